"""One layer of the actor: hyper-connected attention, then hyper-connected experts."""

# B rows, S tokens per row, T = B·S, N streams, D model width
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.models.deepseek_v4.attention import HybridAttention
from services.trainer.models.deepseek_v4.experts import MixtureOfExperts
from services.trainer.models.deepseek_v4.hyper_connections import HyperConnection
from services.trainer.models.deepseek_v4.layers import RMSNorm
from services.trainer.models.deepseek_v4.rope import layer_rotations
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import UNQUANTISED, ActivationQuant

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class BlockInput:
    """What every layer needs besides the streams."""

    token_ids: Tensor | tuple[Tensor, ...]  # [B, S], or slabs of rows of different widths
    routes: Routes
    quant: ActivationQuant = UNQUANTISED

    @property
    def slabs(self) -> tuple[Tensor, ...]:
        return (self.token_ids,) if isinstance(self.token_ids, Tensor) else self.token_ids

    @property
    def flat_ids(self) -> Tensor:
        """`[T]`: slab after slab, row after row."""
        return torch.cat([ids.flatten() for ids in self.slabs])


class Block(nn.Module):
    """`recompute`: which activations are computed again in the backward pass, not kept."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, layer: int
    ) -> None:
        super().__init__()
        self.architecture, self.layer = architecture, layer
        self.recompute: Recompute = "none"
        self.hc_attn = HyperConnection(config, architecture)
        self.attn_norm = RMSNorm(config, architecture.hidden_size)
        self.attn = HybridAttention(config, architecture, layer=layer)
        self.hc_ffn = HyperConnection(config, architecture)
        self.ffn_norm = RMSNorm(config, architecture.hidden_size)
        self.ffn = MixtureOfExperts(config, architecture, layer=layer)

    def forward(self, h_TND: Tensor, given: BlockInput, trace: Trace) -> Tensor:
        """Streams in, streams out, `[T, N, D]`; each row of token ids is a sequence."""
        if self.recompute == "full":
            return again(self._layer, h_TND, given, trace)
        return self._layer(h_TND, given, trace)

    def _layer(self, h_TND: Tensor, given: BlockInput, trace: Trace) -> Tensor:
        attn: Callable[..., Tensor] = self.attn
        ffn: Callable[..., Tensor] = self.ffn
        if self.recompute == "selective":
            attn, ffn = partial(again, attn), partial(again, ffn)
        y_TD, post, comb = self._mix(self.hc_attn, "hc_attn", h_TND, trace)
        y_TD = trace.flat("attn", self._attend(attn, self.attn_norm(y_TD), given, trace))
        h_TND = trace.flat("hc_attn.merge", self.hc_attn.merge(y_TD, h_TND, post, comb))

        y_TD, post, comb = self._mix(self.hc_ffn, "hc_ffn", h_TND, trace)
        x_TD = trace.flat("ffn.norm", self.ffn_norm(y_TD))
        y_TD = ffn(x_TD, given.flat_ids, given.routes, trace, given.quant)
        y_TD = trace.flat("ffn", y_TD)
        return trace.flat("hc_ffn.merge", self.hc_ffn.merge(y_TD, h_TND, post, comb))

    def _attend(
        self, attn: Callable[..., Tensor], x_TD: Tensor, given: BlockInput, trace: Trace
    ) -> Tensor:
        """Rows see only themselves, so slabs go through one after the other."""
        parts = []
        for number, x in enumerate(x_TD.split([ids.numel() for ids in given.slabs])):
            ids_BS = given.slabs[number]
            turns = layer_rotations(self.architecture, self.layer, ids_BS)
            x_BSD = trace("attn.norm", x.view(*ids_BS.shape, -1))
            parts.append(attn(x_BSD, turns, given.routes.of_slab(number), trace, given.quant))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(
        self, connection: HyperConnection, name: str, h_TND: Tensor, trace: Trace
    ) -> tuple[Tensor, Tensor, Tensor]:
        y_TD, post_NT, comb_NNT = connection.mix(h_TND)
        trace.flat(f"{name}.mix", y_TD)
        trace.flat(f"{name}.post", post_NT.t())
        trace.flat(f"{name}.comb", comb_NNT.permute(2, 0, 1))
        return y_TD, post_NT, comb_NNT


def again(part: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`part(*inputs)`, of which only the inputs are kept. Nothing in a layer is random, and every
    rank computes again in the same order, collectives included."""
    result: Tensor = checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
