"""A sampler of which every sub-module reads what the reference's had: no departure is passed on.

What a sub-module makes is kept under its trace point, and replaced by the reference's value before
the next one reads it. So each is held against the reference alone, in the precision it serves in.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Compression, Route, Run
from services.rollout.models.deepseek_v4_weights import derive
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.trace import split_point
from shared.quant.activation import ActivationQuant
from tests.parity.engines import States, Weights


@torch.inference_mode()
def states_on_equal_inputs(
    arch: Architecture, tensors: Weights, tokens: Tensor, quant: ActivationQuant, given: States
) -> States:
    """What the sampler's sub-modules make of `given`, the reference's states of one row."""
    (row,) = tokens.numpy()
    exchange = _Exchange(given, len(row))
    cache = Cache(arch, num_slots=1, max_tokens=len(row))
    step, derived = cache.prefill_step([Run(0, 0, row)]), derive(arch, tensors)
    sampler = _Fed(arch, quant, exchange, exchange)
    sampler.logits(derived, sampler.hidden(derived, cache, step))
    return exchange.made


@dataclass(slots=True)
class _Exchange:
    """Keeps a value, and writes the reference's in its place."""

    given: States
    num_tokens: int
    made: States = field(default_factory=dict)

    def __call__(self, name: str, value: Tensor) -> None:
        right = self.given[name].squeeze(0)
        if split_point(name)[1].startswith("attn.indexer"):
            value = value.flatten(0, -3)[0][: len(right), : right.shape[1]]
        self.made[name] = value[: len(right)].clone()
        if value.is_floating_point():
            value[: len(right)].copy_(right)


@dataclass(frozen=True)
class _Fed(Sampler):
    """Where a trace point is a copy of what is read, what is read is replaced here."""

    exchange: Any = None

    def _compress(self, layer: int, *given: Any) -> None:
        Sampler._compress(self, layer, *given)
        _, keys, _, plan, _ = given
        assert isinstance(plan, Compression)
        if plan.emission is not None:
            (right,) = self.exchange.given[f"layers.{layer}.attn.compressor"]
            rows = plan.emission.key_rows[: len(right)]
            keys.view(-1, keys.shape[-1]).index_copy_(0, rows, right)

    def _note_selected(self, layer: int, bias: Tensor, route: Route) -> None:
        Sampler._note_selected(self, layer, bias, route)
        (right,) = self.exchange.given[f"layers.{layer}.attn.indexer"]
        first = route.num_keys - route.num_entries
        read = bias[0, : right.shape[0], first : first + right.shape[1]]
        read.copy_(torch.where(right, 0.0, -torch.inf))

    def _note_router(self, layer: int, weights_Nk: Tensor, experts_Nk: Tensor) -> None:
        Sampler._note_router(self, layer, weights_Nk, experts_Nk)
        (right,) = self.exchange.given[f"layers.{layer}.router"]
        experts = right.topk(self.arch.num_experts_per_tok, -1).indices
        # In the sampler's own order where it chose the same, so that sums run alike.
        same = experts_Nk[: len(right)].sort(-1).values == experts.sort(-1).values
        experts = torch.where(same.all(-1, keepdim=True), experts_Nk[: len(right)], experts)
        experts_Nk[: len(right)].copy_(experts)
        weights_Nk[: len(right)].copy_(right.gather(-1, experts))
