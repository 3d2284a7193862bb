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

from services.trainer.models.deepseek_v4.layers import row_dots, wide

QUERY_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Reach:
    """What a query may see: `window` tokens with itself, entries of closed blocks of `ratio`."""

    window: int
    ratio: int
    first: int = 0
    """Position of the first query; keys and entries always begin at 0."""


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


def visible(like_BSW: Tensor, reach: Reach) -> Tensor:
    """`[S, W]` bool: entry w is visible to query t iff `w < (t + 1) // ratio`."""
    position = reach.first + torch.arange(like_BSW.size(1), device=like_BSW.device).unsqueeze(-1)
    return torch.arange(like_BSW.size(2), device=like_BSW.device) < (position + 1) // reach.ratio


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
        for chunk in _chunks(q, kv, entries, selected, reach):
            mixed = torch.bmm(chunk.weights(sink), chunk.keys)
            out[:, chunk.queries] = mixed.view_as(chunk.q).to(q.dtype)
        ctx.save_for_backward(q, kv, sink, entries, selected, out)
        ctx.reach = reach
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink, entries, selected, out = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_kv = torch.zeros_like(kv, dtype=wide(kv).dtype)
        grad_entries = None if entries is None else torch.zeros_like(entries, dtype=grad_kv.dtype)
        grad_sink = torch.zeros_like(sink, dtype=grad_kv.dtype)
        for chunk in _chunks(q, kv, entries, selected, ctx.reach):
            weights = chunk.weights(sink)
            grad = wide(grad_out[:, chunk.queries]).flatten(1, 2)
            along = row_dots(grad, wide(out[:, chunk.queries]).flatten(1, 2)).unsqueeze(-1)
            grad_scores = torch.baddbmm(along, grad, chunk.keys.transpose(1, 2), beta=-1)
            grad_scores.mul_(weights)
            grad_sink += grad_scores[..., -1].view(-1, sink.size(0)).sum(0)
            mixed = torch.bmm(grad_scores, chunk.keys).mul_(chunk.scale)
            grad_q[:, chunk.queries] = mixed.view_as(chunk.q)
            grad_keys = torch.bmm(weights.transpose(1, 2), grad)
            queries = chunk.q.flatten(1, 2)
            grad_keys.baddbmm_(grad_scores.transpose(1, 2), queries, alpha=chunk.scale)
            grad_kv[:, chunk.tokens] += grad_keys[:, : chunk.num_tokens]
            if grad_entries is not None:
                grad_entries[:, : chunk.num_entries] += grad_keys[:, chunk.num_tokens : -1]
        if grad_entries is not None:
            grad_entries = grad_entries.to(entries.dtype)
        return grad_q, grad_kv.to(kv.dtype), grad_sink.to(sink.dtype), grad_entries, None, None


@dataclass(slots=True)
class _Chunk:
    """Some queries with the keys they may see: window tokens, then entries, then the sink.

    The sink is a key of zeros: it scores 0, to which the head's sink is added, and its value is 0.
    """

    queries: slice
    tokens: slice
    q: Tensor  # [B, c, H, K] FP32
    keys: Tensor  # [B, num_tokens + num_entries + 1, K] FP32
    bias: Tensor  # [c, n] or [B, c, n] FP32: -inf where a key may not be seen, else 0
    num_tokens: int
    num_entries: int
    scale: float

    def weights(self, sink: Tensor) -> Tensor:
        """Softmax over the keys and the sink, `[B, c · H, n]` FP32."""
        bias = self.bias.unsqueeze(-2).repeat(*[1] * (self.bias.dim() - 1), len(sink), 1)
        bias[..., -1] = wide(sink)
        scores = torch.baddbmm(
            bias.flatten(-3, -2), self.q.flatten(1, 2), self.keys.transpose(1, 2), alpha=self.scale
        )
        return torch.softmax(scores, -1)


def _chunks(
    q: Tensor, kv: Tensor, entries: Tensor | None, selected: Tensor | None, reach: Reach
) -> Iterator[_Chunk]:
    length = q.size(1)
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        place = slice(reach.first + start, reach.first + stop)
        first = max(0, place.start - reach.window + 1)
        num_entries = 0 if entries is None else min(entries.size(1), place.stop // reach.ratio)
        keys = [wide(kv[:, first : place.stop]), wide(kv.new_zeros(kv.size(0), 1, kv.size(2)))]
        if entries is not None:
            keys.insert(1, wide(entries[:, :num_entries]))
        queries = slice(start, stop)
        chosen = None if selected is None else selected[:, queries, :num_entries]
        yield _Chunk(
            queries=queries,
            tokens=slice(first, place.stop),
            q=wide(q[:, queries]).contiguous(),
            keys=torch.cat(keys, 1),
            bias=_bias(place, first, num_entries, chosen, reach, like=keys[0]),
            num_tokens=place.stop - first,
            num_entries=num_entries,
            scale=q.size(-1) ** -0.5,
        )


def _bias(
    place: slice,
    first: int,
    num_entries: int,
    chosen: Tensor | None,
    reach: Reach,
    *,
    like: Tensor,
) -> Tensor:
    """-inf for tokens outside the window or ahead, and for entries not closed or not chosen.

    `place` is where the queries stand in their rows.
    """
    position = torch.arange(place.start, place.stop, device=like.device).unsqueeze(-1)
    token = torch.arange(first, place.stop, device=like.device)
    hidden = [(token > position) | (token <= position - reach.window)]
    if num_entries:
        entry = torch.arange(num_entries, device=like.device)
        hidden.append(entry >= (position + 1) // reach.ratio)
    hidden.append(torch.zeros_like(position, dtype=torch.bool))
    bias = like.new_zeros(len(position), 1).masked_fill(torch.cat(hidden, -1), float("-inf"))
    if chosen is None:
        return bias
    bias = bias.repeat(len(chosen), 1, 1)
    bias[..., token.numel() : -1].masked_fill_(~chosen, float("-inf"))
    return bias
