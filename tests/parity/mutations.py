"""The mistakes that ports of this model made, each to be planted in one implementation.

A mutation changes the weights or the architecture that one side reads, or one function of it, for
as long as `planted` is open; the other side stays right. `at` is what the layer walk has to say.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.models import deepseek_v4 as sampler_model
from services.rollout.models import deepseek_v4_cache as sampler_cache
from services.trainer.models.deepseek_v4 import attention as actor_attention
from services.trainer.models.deepseek_v4 import hyper_connections
from services.trainer.models.deepseek_v4.compressor import Compressor
from services.trainer.models.deepseek_v4.experts import RoutedExperts
from services.trainer.models.deepseek_v4.hyper_connections import HyperConnection
from services.trainer.models.deepseek_v4.router import Router
from shared.models.deepseek_v4 import reference
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import fake_e4m3
from tests.parity.engines import Case, Weights
from tests.tiny_deepseek_v4 import SMALL

Side = Literal["reference", "actor", "sampler"]
SIDES: tuple[Side, ...] = ("reference", "actor", "sampler")


@dataclass(slots=True)
class Planted:
    """What the wrong side is built from."""

    weights: dict[str, Tensor]
    arch: Architecture
    patch: pytest.MonkeyPatch


Plant = Callable[[Planted], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    at: str
    plants: dict[Side, Plant]
    margin: float = 10
    """Times the suite's bound that a check must see: a mistake is not to be seen by luck."""

    @contextmanager
    def planted(self, side: Side, known: Case) -> Iterator[tuple[Architecture, Weights]]:
        """Architecture and weights of the side that is wrong now."""
        with pytest.MonkeyPatch.context() as patch:
            wrong = Planted(dict(known.weights), known.arch, patch)
            self.plants[side](wrong)
            yield wrong.arch, wrong.weights


def everywhere(at: str, plant: Plant) -> Mutation:
    return Mutation(at, dict.fromkeys(SIDES, plant))


def weights_changed(suffix: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(wrong: Planted) -> None:
        names = [name for name in wrong.weights if name.endswith(suffix)]
        assert names, suffix
        for name in names:
            wrong.weights[name] = change(wrong.weights[name])

    return plant


def arch_changed(**fields: Any) -> Plant:
    def plant(wrong: Planted) -> None:
        wrong.arch = replace(wrong.arch, **fields)

    return plant


def function_changed(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Plant:
    def plant(wrong: Planted) -> None:
        wrong.patch.setattr(owner, name, make(getattr(owner, name)))

    return plant


# ------------------------------------------------------------------ hyper-connections


def _comb_not_transposed() -> Mutation:
    def of_actor(merge: Callable) -> Callable:
        return lambda self, y, h, post, comb: merge(self, y, h, post, comb.transpose(0, 1))

    def of_sampler(merge: Callable) -> Callable:
        def merged(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            square = comb.view(h.shape[1], h.shape[1], -1)
            return merge(y, h, post, square.transpose(0, 1).reshape(comb.shape))

        return merged

    def of_reference(merge: Callable) -> Callable:
        return lambda y, h, post, comb: merge(y, h, post, comb.transpose(2, 3))

    return Mutation(
        "layer 0 · mHC merge after experts",  # before it all streams are the same
        {
            "reference": function_changed(reference, "merge", of_reference),
            "actor": function_changed(HyperConnection, "merge", of_actor),
            "sampler": function_changed(sampler_model, "_merge", of_sampler),
        },
    )


def through_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _mapping_in_bf16() -> Mutation:
    """The product of the streams with fn leaves a fused kernel in the activations' precision."""

    def of_any(product: Callable) -> Callable:
        return lambda *given: through_bf16(product(*given))

    return Mutation(
        "layer 0 · mHC mix before attention",
        {
            "reference": function_changed(reference, "_projected", of_any),
            "actor": function_changed(hyper_connections._StreamCoefficients, "forward", of_any),
            "sampler": function_changed(sampler_model, "_mixing", of_any),
        },
    )


# ------------------------------------------------------------------ attention


def _no_inverse_rope() -> Mutation:
    def of_reference(rotate: Callable) -> Callable:
        return lambda x, turns: x if turns.is_conj() else rotate(x, turns)

    def of_actor(rotate: Callable) -> Callable:
        return lambda x, turns, *, inverse=False: x if inverse else rotate(x, turns)

    def of_sampler(turns_at: Callable) -> Callable:
        def forth_only(self: Any, position: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
            forth, back = turns_at(self, position, compressed=compressed)
            return forth, torch.ones_like(back)

        return forth_only

    return Mutation(
        "layer 0 · attention core",
        {
            "reference": function_changed(reference, "rotate", of_reference),
            "actor": function_changed(actor_attention, "rotate", of_actor),
            "sampler": function_changed(sampler_cache.Cache, "_turns_at", of_sampler),
        },
    )


def _half_split_rope() -> Mutation:
    def of_reference(rotate: Callable) -> Callable:
        def turn(x: Tensor, turns: Tensor) -> Tensor:
            rope = 2 * turns.shape[-1]
            tail = x[..., -rope:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            turned = rotate(torch.cat((x[..., :-rope], tail), -1), turns)
            back = turned[..., -rope:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            return torch.cat((turned[..., :-rope], back), -1)

        return turn

    plant = function_changed(reference, "rotate", of_reference)
    return Mutation("layer 0 · query projection and RoPE", {"reference": plant})


def _entries_visible_late() -> Mutation:
    def of_reference(visible: Callable) -> Callable:
        return lambda positions, entries, ratio: visible(positions - 1, entries, ratio)

    def of_sampler(seen: Callable) -> Callable:
        return lambda positions, ratio: seen(positions - 1, ratio)

    return Mutation(
        "layer 2 · indexer",  # whose choice is among the visible entries
        {
            "reference": function_changed(reference, "_visible", of_reference),
            "sampler": function_changed(sampler_cache, "_seen", of_sampler),
        },
    )


class _YarnInWindows(Architecture):
    """Layers that compress nothing turn their pairs as the others do, by their own θ."""

    def rope_frequencies(self, layer: int) -> tuple[float, ...]:
        if self.compress_ratios[layer] == 0:
            ratios = tuple(ratio or 4 for ratio in self.compress_ratios)
            bent = replace(self, compress_ratios=ratios, compress_rope_theta=self.rope_theta)
            return Architecture.rope_frequencies(bent, layer)
        return Architecture.rope_frequencies(self, layer)


def _yarn_in_windows(wrong: Planted) -> None:
    own = {field.name: getattr(wrong.arch, field.name) for field in fields(Architecture)}
    wrong.arch = _YarnInWindows(**own)


def _magnitude_factor() -> Mutation:
    """Keys are values too, so what other models fold into both goes into the queries here."""
    assert SMALL.rope_scaling is not None
    factor = 0.1 * math.log(SMALL.rope_scaling.factor) + 1

    def of_any(attend: Callable) -> Callable:
        return lambda q, *others, **named: attend(q * factor, *others, **named)

    return Mutation(
        "layer 0 · attention core",
        {
            "reference": function_changed(reference, "attend", of_any),
            "actor": function_changed(actor_attention, "attend", of_any),
            "sampler": function_changed(sampler_model, "_attend", of_any),
        },
    )


def _entries_turned_by_index() -> Mutation:
    """Entry w stands at position w instead of that of its block's first token."""

    def of_reference(compress: Callable) -> Callable:
        def wrong(part: Any, *others: Any) -> Tensor:
            right, ratio = reference.rotations, part.arch.compress_ratios[part.layer]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    reference,
                    "rotations",
                    lambda arch, layer, at, dtype: right(arch, layer, at // ratio, dtype),
                )
                return compress(part, *others)

        return wrong

    def of_actor(forward: Callable) -> Callable:
        def wrong(self: Any, x: Tensor, turns: Tensor) -> Tensor | None:
            return forward(self, x, turns.repeat_interleave(self.ratio, 0)[: len(turns)])

        return wrong

    def of_sampler(emission: Callable) -> Callable:
        def wrong(self: Any, ratio: int, slots: Any, blocks: Any, **named: Any) -> Any:
            right = emission(self, ratio, slots, blocks, **named)
            at = torch.zeros(len(right.turns), dtype=torch.int64)
            at[: len(blocks)] = torch.from_numpy(blocks)
            return replace(right, turns=self._turns[1][at, 0])

        return wrong

    return Mutation(
        "layer 2 · compressor",
        {
            "reference": function_changed(reference, "compress", of_reference),
            "actor": function_changed(Compressor, "forward", of_actor),
            "sampler": function_changed(sampler_cache.Cache, "_emission", of_sampler),
        },
    )


def swap_halves(ape: Tensor) -> Tensor:
    return torch.cat(ape.chunk(2, -1)[::-1], -1)


def through_e4m3(weight: Tensor) -> Tensor:
    return fake_e4m3(weight, group=128)


# ------------------------------------------------------------------ experts


def _no_floor_under_scores() -> Mutation:
    """A token whose scores all underflow is divided by their sum."""

    def of_pair(route: Callable) -> Callable:
        def wrong(*given: Any) -> tuple[Tensor, Tensor]:
            weights, ids = route(*given)
            return weights.where(weights.sum(-1, keepdim=True) > 0, torch.nan), ids

        return wrong

    def of_actor(forward: Callable) -> Callable:
        def wrong(*given: Any) -> tuple[Tensor, Tensor]:
            ids, weights = forward(*given)
            return ids, weights.where(weights.sum(-1, keepdim=True) > 0, torch.nan)

        return wrong

    return Mutation(
        "layer 0 · router",
        {
            "reference": function_changed(reference, "route", of_pair),
            "actor": function_changed(Router, "forward", of_actor),
            "sampler": function_changed(sampler_model.Sampler, "_route", of_pair),
        },
    )


def _routed_clamp_off() -> Mutation:
    def of_reference(dispatch: Callable) -> Callable:
        def unclamped(part: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            wide_open = replace(part.arch, swiglu_limit=1e9)
            return dispatch(replace(part, arch=wide_open), x, weights, ids)

        return unclamped

    def of_actor(forward: Callable) -> Callable:
        def unclamped(self: Any, *inputs: Tensor) -> Tensor:
            self.limit = 0.0
            return forward(self, *inputs)

        return unclamped

    def of_sampler(swiglu: Callable) -> Callable:
        def unclamped(self: Any, inner: Tensor, routed: int) -> Tensor:
            gate, up = inner[:routed].chunk(2, -1)
            return torch.cat((functional.silu(gate) * up, swiglu(self, inner[routed:], 0)))

        return unclamped

    return Mutation(
        "layer 0 · routed experts",
        {
            "reference": function_changed(reference, "dispatch", of_reference),
            "actor": function_changed(RoutedExperts, "forward", of_actor),
            "sampler": function_changed(sampler_model.Sampler, "_swiglu", of_sampler),
        },
    )


MUTATIONS: dict[str, Mutation] = {
    "C not transposed": _comb_not_transposed(),
    "Sinkhorn 5": everywhere(
        "layer 0 · mHC Sinkhorn before attention", arch_changed(hc_sinkhorn_iters=5)
    ),
    "hc fn in BF16": everywhere(
        "layer 0 · mHC mix before attention", weights_changed("_fn", through_bf16)
    ),
    "hc base in BF16": everywhere(
        "layer 0 · mHC mix before attention", weights_changed("_base", through_bf16)
    ),
    "hc scale in BF16": everywhere(
        "layer 0 · mHC mix before attention", weights_changed("_scale", through_bf16)
    ),
    "hc mapping in BF16": _mapping_in_bf16(),
    "no inverse RoPE": _no_inverse_rope(),
    "half-split RoPE": _half_split_rope(),
    "YaRN in window layers": everywhere("layer 0 · query projection and RoPE", _yarn_in_windows),
    "YaRN off": everywhere("layer 2 · query projection and RoPE", arch_changed(rope_scaling=None)),
    "one θ, the small one": everywhere(
        "layer 2 · query projection and RoPE", arch_changed(compress_rope_theta=SMALL.rope_theta)
    ),
    "one θ, the large one": everywhere(
        "layer 0 · query projection and RoPE", arch_changed(rope_theta=SMALL.compress_rope_theta)
    ),
    "magnitude factor of YaRN": _magnitude_factor(),
    "window one too long": everywhere(
        "layer 0 · attention core", arch_changed(sliding_window=SMALL.sliding_window + 1)
    ),
    "sink zero": everywhere(
        "layer 0 · attention core", weights_changed("attn_sink", torch.zeros_like)
    ),
    "sink in BF16": everywhere(
        "layer 0 · attention core", weights_changed("attn_sink", through_bf16)
    ),
    "APE halves swapped": everywhere(
        "layer 2 · compressor", weights_changed("layers.2.attn.compressor.ape", swap_halves)
    ),
    "APE zero in C4": everywhere(
        "layer 2 · compressor", weights_changed("layers.2.attn.compressor.ape", torch.zeros_like)
    ),
    "APE zero in C128": everywhere(
        "layer 3 · compressor", weights_changed("layers.3.attn.compressor.ape", torch.zeros_like)
    ),
    "APE in BF16": everywhere("layer 2 · compressor", weights_changed(".ape", through_bf16)),
    "compressor in FP8": everywhere(
        "layer 2 · compressor", weights_changed("attn.compressor.wkv.weight", through_e4m3)
    ),
    "APE zero in the indexer": everywhere(
        "layer 2 · indexer", weights_changed("indexer.compressor.ape", torch.zeros_like)
    ),
    "indexer's weights in FP8": everywhere(
        "layer 2 · indexer", weights_changed("indexer.weights_proj.weight", through_e4m3)
    ),
    "entries turned by their index": _entries_turned_by_index(),
    "entry visible one token late": _entries_visible_late(),
    "indexer off": everywhere("layer 2 · indexer", arch_changed(index_topk=10_000)),
    "tid2eid of one token for all": everywhere(
        "layer 0 · router", weights_changed("tid2eid", lambda table: table[:1].expand_as(table))
    ),
    "tid2eid of the token before": everywhere(
        "layer 0 · router", weights_changed("tid2eid", lambda table: table.roll(1, 0))
    ),
    "gate bias ignored": everywhere(
        "layer 3 · router", weights_changed("gate.bias", torch.zeros_like)
    ),
    "routed scale 1": everywhere("layer 0 · router", arch_changed(routed_scaling_factor=1.0)),
    "clamp off": everywhere("layer 0 · routed experts", arch_changed(swiglu_limit=1e9)),
    "clamp off for the routed experts": _routed_clamp_off(),
    "clamp off for the shared expert": everywhere(
        "layer 0 · shared expert", arch_changed(clamp_shared_experts=False)
    ),
}
"""On `SMALL`: layers 0 and 1 window, 2 and 4 C4, 3 C128; layers 0 to 2 hash routed."""

UNSEEN_BELOW_TOPK = (
    "APE zero in the indexer",
    "indexer's weights in FP8",
)
"""No output shows these while an indexer keeps every entry, as Flash's does up to 2,048 tokens."""

UNDERFLOW = _no_floor_under_scores()
"""Seen where a gate is so wide that all scores of a token underflow."""

FAINT: dict[str, Mutation] = {
    "Sinkhorn 19": Mutation(
        "layer 3 · mHC Sinkhorn before experts",  # where it had converged least
        dict.fromkeys(SIDES, arch_changed(hc_sinkhorn_iters=19)),
        margin=2,
    )
}
"""Seen in FP32 alone: between engines that round they are below what a flipped code does."""
