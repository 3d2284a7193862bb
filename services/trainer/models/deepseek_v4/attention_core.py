"""Softmax attention over a sliding window plus selected compressed entries, with a sink per head.

K = V: one shared vector per token or entry. Queries are taken in chunks and the weights are
recomputed backward, so memory grows with chunk x keys, never with tokens x keys. All in FP32.
"""

# B rows, S tokens per row, H heads, K head width, W entries; c queries and n keys of a chunk
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.models.deepseek_v4.layers import wide

QUERY_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Reach:
    """What a query may see: `window` tokens with itself, entries of closed blocks of `ratio`."""

    window: int
    ratio: int


def attend(
    q_BSHK: Tensor,
    kv_BSK: Tensor,
    sink_H: Tensor,
    entries_BWK: Tensor | None = None,
    selected_BSW: Tensor | None = None,
    *,
    reach: Reach,
) -> Tensor:
    """`Σ_i softmax(q·k_i · K^-½ ; sink) · k_i` -> `[B, S, H, K]` in the dtype of q.

    `selected_BSW` (bool) narrows the visible entries; an entry w is visible to query t iff
    `w < (t + 1) // ratio`. The sink takes part in the denominator only.
    """
    return _Attend.apply(q_BSHK, kv_BSK, sink_H, entries_BWK, selected_BSW, reach)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sink: Tensor,
        entries: Tensor | None,
        selected: Tensor | None,
        reach: Reach,
    ) -> Tensor:
        out = torch.empty_like(q)
        log_total = torch.empty(q.shape[:-1], dtype=wide(q).dtype, device=q.device)
        sink_wide = wide(sink)
        for chunk in _chunks(q, kv, entries, selected, reach):
            scores = chunk.scores()
            top = torch.maximum(scores.amax(-1), sink_wide)
            weights = scores.sub_(top.unsqueeze(-1)).exp_()
            total = weights.sum(-1).add_(torch.exp(sink_wide - top))
            mixed = torch.bmm(weights.flatten(1, 2), chunk.keys).view_as(chunk.q)
            out[:, chunk.queries] = mixed.div_(total.unsqueeze(-1)).to(q.dtype)
            log_total[:, chunk.queries] = top.add_(total.log_())
        ctx.save_for_backward(q, kv, sink, entries, selected, out, log_total)
        ctx.reach = reach
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink, entries, selected, out, log_total = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_kv = torch.zeros_like(kv, dtype=wide(kv).dtype)
        grad_entries = None if entries is None else torch.zeros_like(entries, dtype=grad_kv.dtype)
        for chunk in _chunks(q, kv, entries, selected, ctx.reach):
            weights = chunk.scores().sub_(log_total[:, chunk.queries].unsqueeze(-1)).exp_()
            grad = wide(grad_out[:, chunk.queries]).flatten(1, 2)
            along = torch.linalg.vecdot(grad, wide(out[:, chunk.queries]).flatten(1, 2))
            weights = weights.flatten(1, 2)
            grad_scores = torch.bmm(grad, chunk.keys.transpose(1, 2)).sub_(along.unsqueeze(-1))
            grad_scores.mul_(weights).mul_(chunk.scale)
            grad_q[:, chunk.queries] = torch.bmm(grad_scores, chunk.keys).view_as(chunk.q)
            grad_keys = torch.bmm(grad_scores.transpose(1, 2), chunk.q.flatten(1, 2))
            grad_keys.baddbmm_(weights.transpose(1, 2), grad)
            grad_kv[:, chunk.tokens] += grad_keys[:, : chunk.num_tokens]
            if grad_entries is not None:
                grad_entries[:, : chunk.num_entries] += grad_keys[:, chunk.num_tokens :]
        grad_sink = _sink_gradient(sink, log_total, grad_out, out)
        if grad_entries is not None:
            grad_entries = grad_entries.to(entries.dtype)
        return grad_q, grad_kv.to(kv.dtype), grad_sink, grad_entries, None, None


def _sink_gradient(sink: Tensor, log_total: Tensor, grad_out: Tensor, out: Tensor) -> Tensor:
    """The sink's weight is exp(sink - log_total) and its value is zero."""
    along = torch.linalg.vecdot(wide(grad_out), wide(out))
    return (torch.exp(wide(sink) - log_total) * along).sum((0, 1)).neg_().to(sink.dtype)


@dataclass(slots=True)
class _Chunk:
    """Queries `queries` with the keys they may see: `num_tokens` window tokens, then entries."""

    queries: slice
    tokens: slice
    q: Tensor  # [B, c, H, K] FP32
    keys: Tensor  # [B, n, K] FP32
    hidden: Tensor  # [c, n] or [B, c, n] bool: may not be seen
    num_tokens: int
    num_entries: int
    scale: float

    def scores(self) -> Tensor:
        """`[B, c, H, n]`, hidden keys at -inf."""
        scores = torch.bmm(self.q.flatten(1, 2), self.keys.transpose(1, 2)).mul_(self.scale)
        scores = scores.view(*self.q.shape[:-1], -1)
        return scores.masked_fill_(self.hidden.unsqueeze(-2), float("-inf"))


def _chunks(
    q: Tensor, kv: Tensor, entries: Tensor | None, selected: Tensor | None, reach: Reach
) -> Iterator[_Chunk]:
    length = q.size(1)
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        first = max(0, start - reach.window + 1)
        position = torch.arange(start, stop, device=q.device).unsqueeze(-1)
        token = torch.arange(first, stop, device=q.device)
        hidden = (token > position) | (token <= position - reach.window)
        keys = wide(kv[:, first:stop])
        num_entries = 0 if entries is None else min(entries.size(1), stop // reach.ratio)
        if num_entries and entries is not None:
            keys = torch.cat((keys, wide(entries[:, :num_entries])), 1)
            entry = torch.arange(num_entries, device=q.device)
            unseen = entry >= (position + 1) // reach.ratio
            if selected is not None:
                unseen = unseen | ~selected[:, start:stop, :num_entries]
                hidden = hidden.expand(q.size(0), -1, -1)
            hidden = torch.cat((hidden, unseen), -1)
        yield _Chunk(
            queries=slice(start, stop),
            tokens=slice(first, stop),
            q=wide(q[:, start:stop]).contiguous(),
            keys=keys,
            hidden=hidden,
            num_tokens=stop - first,
            num_entries=num_entries,
            scale=q.size(-1) ** -0.5,
        )
