"""Selects which compressed entries a query may attend to.

Selection is not differentiable and no loss reaches it: the indexer is frozen and runs without
gradients. Ties go to the lower entry, so that every engine selects alike.
"""

# B rows, S tokens, W entries, H indexer heads, K indexer width
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from services.trainer.models.deepseek_v4 import context
from services.trainer.models.deepseek_v4.activations import indexer_vectors
from services.trainer.models.deepseek_v4.compressor import Compressor
from services.trainer.models.deepseek_v4.layers import ReplicatedLinear, freeze, wide
from services.trainer.models.deepseek_v4.rope import rotate
from services.trainer.models.deepseek_v4.trace import Trace
from shared.models.deepseek_v4.architecture import Architecture

QUERY_CHUNK = 128


class Indexer(nn.Module):
    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, ratio: int
    ) -> None:
        super().__init__()
        self.heads, self.width = architecture.index_n_heads, architecture.index_head_dim
        self.top_k = architecture.index_topk
        self.ratio = ratio
        hidden_size = architecture.hidden_size
        self.wq_b = ReplicatedLinear(config, architecture.q_lora_rank, self.heads * self.width)
        self.weights_proj = ReplicatedLinear(config, hidden_size, self.heads)
        self.compressor = Compressor(config, hidden_size=hidden_size, width=self.width, ratio=ratio)
        freeze(self)

    @torch.no_grad()
    def forward(
        self,
        x_BSD: Tensor,
        qr_BSC: Tensor,
        turns: Tensor,
        form: Literal["none", "fp8", "fp4"],
        trace: Trace,
    ) -> Tensor | None:
        """-> `[B, S, W]` bool, the entries each query may use; None while all of them survive.

        Queries and entries are rounded to `form`; `qr` comes rounded as the input of a linear.
        """
        rows, length = x_BSD.shape[:2]
        keeps_all = context.size() * length // self.ratio <= self.top_k
        if keeps_all and trace.states is None:
            return None
        keys_BWK = self.compressor(x_BSD, turns)
        if keys_BWK is None:  # too few tokens for an entry
            trace("attn.indexer.scores", x_BSD.new_empty(rows, length, 0))
            return None
        keys_BWK, origin = context.gather(keys_BWK), context.first(length)
        selected = torch.ones(rows, length, keys_BWK.size(1), dtype=torch.bool, device=x_BSD.device)
        # Queries before `first` see at most top_k entries and keep them all.
        first = max(0, (self.top_k + 1) * self.ratio - 1 - origin) if trace.states is None else 0
        traced: list[Tensor] = []
        keys_BKW = indexer_vectors(keys_BWK, form).transpose(1, 2)
        for start in range(first, length, QUERY_CHUNK):
            chunk = slice(start, min(start + QUERY_CHUNK, length))
            q_BSHK = self._queries(qr_BSC[:, chunk], turns[chunk])
            scores = self._scores(x_BSD[:, chunk], indexer_vectors(q_BSHK, form), keys_BKW)
            entry = torch.arange(keys_BWK.size(1), device=x_BSD.device)
            local = torch.arange(chunk.start, chunk.stop, device=x_BSD.device)
            position = origin + local.unsqueeze(-1)
            scores.masked_fill_(entry >= (position + 1) // self.ratio, float("-inf"))
            if trace.states is not None:
                traced.append(scores)
            if not keeps_all:
                selected[:, chunk] = top_mask(scores, self.top_k)
        if trace.states is not None:
            trace("attn.indexer.scores", torch.cat(traced, 1))
        return None if keeps_all else selected

    def _queries(self, qr_BSC: Tensor, turns: Tensor) -> Tensor:
        q_BSHK = self.wq_b(qr_BSC).unflatten(-1, (self.heads, self.width))
        return rotate(q_BSHK, turns.unsqueeze(1))

    def _scores(self, x: Tensor, q: Tensor, keys_BKW: Tensor) -> Tensor:
        """`Σ_h a_h · relu(q_h · k_w)` of a chunk of queries, FP32."""
        rows, length = x.shape[:2]
        dots = torch.bmm(q.flatten(1, 2), keys_BKW).relu_().view(rows * length, self.heads, -1)
        weights = wide(linear(x, self.weights_proj.weight))
        weights = weights * (self.width**-0.5 * self.heads**-0.5)
        return torch.bmm(weights.view(rows * length, 1, -1), dots).view(rows, length, -1)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """True at the k highest of the last dimension; of equal scores the lower index wins."""
    threshold = scores.topk(k, -1).values[..., -1:]
    above, equal = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))
