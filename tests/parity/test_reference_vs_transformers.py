"""The reference against transformers' DeepSeek-V4, an independent implementation, in FP32.

Each mistake that ports of this model made is then planted, and has to be seen.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from shared.models.deepseek_v4 import reference
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.reference import Reference
from shared.models.deepseek_v4.runtimes import from_runtime, to_runtime
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED, random_tokens, random_weights

Weights = dict[str, Tensor]

LENGTH = 300  # two entries of 128, dozens of 4, several windows
BOUND = 2e-5  # of the largest logit
GRADIENT_BOUND = 1e-4  # of the norm of each gradient
MODELS = {"aligned": ALIGNED, "small": SMALL, "demo": DEMO, "unscaled": UNSCALED}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def transformers_twin(arch: Architecture, weights: Weights) -> DeepseekV4ForCausalLM:
    """transformers' model with the same weights; strict, so every tensor finds its place."""
    twin = DeepseekV4ForCausalLM(
        DeepseekV4Config(**arch.to_config(), attn_implementation="eager")
    ).eval()
    twin.load_state_dict(to_runtime(weights, arch, "transformers"), strict=True)
    return twin


@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model: str, spread: float) -> None:
    arch = MODELS[model]
    weights = random_weights(arch, seed=3, spread=spread)
    tokens = random_tokens(arch, rows=2, length=LENGTH)
    with torch.no_grad():
        theirs = transformers_twin(arch, weights)(tokens).logits
        ours = Reference(weights, arch).forward(tokens).logits
    assert departure(ours, theirs) <= BOUND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("model", ["small", "demo"])
def test_gradients_equal_transformers(model: str) -> None:
    arch = MODELS[model]
    # Gradients jump where a value is within rounding of the clamp; this seed has no such value.
    weights = random_weights(arch, seed=6)
    tokens = random_tokens(arch, rows=1, length=LENGTH)
    cotangent = torch.randn(1, LENGTH, arch.vocab_size, generator=torch.Generator().manual_seed(7))

    leaves = {n: w.requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    (Reference(leaves, arch).forward(tokens).logits * cotangent).sum().backward()
    twin = transformers_twin(arch, {name: weight.detach() for name, weight in weights.items()})
    (twin(tokens).logits * cotangent).sum().backward()

    theirs = _gradients_by_release_name(twin, arch)
    compared = 0
    for name, weight in leaves.items():
        if weight.grad is None:
            assert not theirs[name].any(), name
            continue
        error = (weight.grad - theirs[name]).norm() / theirs[name].norm()
        assert error <= GRADIENT_BOUND, f"{name}: {error}"
        compared += 1
    assert compared > 100


def test_small_model_sees_every_selection() -> None:
    """The conditions without which the mistakes below would stay hidden."""
    traced: dict[str, Tensor] = {}
    weights = random_weights(SMALL, seed=11)
    tokens = random_tokens(SMALL, rows=1, length=LENGTH)
    Reference(weights, SMALL).forward(tokens, trace=traced.__setitem__)
    assert traced["layers.2.attn.indexer"].sum(-1).max() == SMALL.index_topk
    assert traced["layers.3.attn.compressor"].shape[1] == 2
    assert (traced["layers.4.router"] > 0).sum(-1).eq(SMALL.num_experts_per_tok).all()


Mutation = Callable[[Weights, Architecture, pytest.MonkeyPatch], Architecture]


def _weights_changed(suffix: str, change: Callable[[Tensor], Tensor]) -> Mutation:
    def mutate(weights: Weights, arch: Architecture, patch: pytest.MonkeyPatch) -> Architecture:
        names = [name for name in weights if name.endswith(suffix)]
        assert names, suffix
        for name in names:
            weights[name] = change(weights[name])
        return arch

    return mutate


def _arch_changed(**fields: object) -> Mutation:
    def mutate(weights: Weights, arch: Architecture, patch: pytest.MonkeyPatch) -> Architecture:
        return replace(arch, **fields)  # type: ignore[arg-type]

    return mutate


def _function_changed(name: str, make: Callable[[Callable], Callable]) -> Mutation:
    def mutate(weights: Weights, arch: Architecture, patch: pytest.MonkeyPatch) -> Architecture:
        patch.setattr(reference, name, make(getattr(reference, name)))
        return arch

    return mutate


def _swap_halves(ape: Tensor) -> Tensor:
    return torch.cat(ape.chunk(2, -1)[::-1], -1)


def _forward_turns_only(rotate: Callable) -> Callable:
    def turn(x: Tensor, turns: Tensor) -> Tensor:
        return x if turns.is_conj() else rotate(x, turns)

    return turn


def _all_visible_one_late(visible: Callable) -> Callable:
    return lambda positions, entries, ratio: visible(positions - 1, entries, ratio)


def _half_split(rotate: Callable) -> Callable:
    def turn(x: Tensor, turns: Tensor) -> Tensor:
        rope = 2 * turns.shape[-1]
        tail = x[..., -rope:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = rotate(torch.cat((x[..., :-rope], tail), -1), turns)
        back = turned[..., -rope:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((turned[..., :-rope], back), -1)

    return turn


MUTATIONS: dict[str, Mutation] = {
    "comb not transposed": _function_changed(
        "merge", lambda merge: lambda y, h, post, comb: merge(y, h, post, comb.transpose(2, 3))
    ),
    "no inverse RoPE": _function_changed("rotate", _forward_turns_only),
    "half-split RoPE": _function_changed("rotate", _half_split),
    "entry visible one token late": _function_changed("_visible", _all_visible_one_late),
    "YaRN off": _arch_changed(rope_scaling=None),
    "one θ, the small one": _arch_changed(compress_rope_theta=SMALL.rope_theta),
    "one θ, the large one": _arch_changed(rope_theta=SMALL.compress_rope_theta),
    "window one too long": _arch_changed(sliding_window=SMALL.sliding_window + 1),
    "APE halves swapped": _weights_changed("layers.2.attn.compressor.ape", _swap_halves),
    "APE zero in C4": _weights_changed("layers.2.attn.compressor.ape", torch.zeros_like),
    "APE zero in C128": _weights_changed("layers.3.attn.compressor.ape", torch.zeros_like),
    "APE zero in the indexer": _weights_changed("indexer.compressor.ape", torch.zeros_like),
    "sink zero": _weights_changed("attn_sink", torch.zeros_like),
    "tid2eid zero": _weights_changed("tid2eid", torch.zeros_like),
    "gate bias ignored": _weights_changed("gate.bias", torch.zeros_like),
    "indexer off": _arch_changed(index_topk=10_000),
    "clamp off": _arch_changed(swiglu_limit=1e9),
    "clamp off for the shared expert": _arch_changed(clamp_shared_experts=False),
    "Sinkhorn 5": _arch_changed(hc_sinkhorn_iters=5),
    "hc fn in BF16": _weights_changed("_fn", lambda w: w.bfloat16().float()),
    "hc base in BF16": _weights_changed("_base", lambda w: w.bfloat16().float()),
    "routed scale 1": _arch_changed(routed_scaling_factor=1.0),
}


@pytest.fixture(scope="module")
def small_case() -> tuple[Weights, Tensor, Tensor]:
    weights = random_weights(SMALL, seed=11)
    tokens = random_tokens(SMALL, rows=1, length=LENGTH)
    with torch.no_grad():
        return weights, tokens, transformers_twin(SMALL, weights)(tokens).logits


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_planted_mistake_is_seen(
    mistake: str, small_case: tuple[Weights, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, tokens, theirs = small_case
    planted = dict(weights)
    arch = MUTATIONS[mistake](planted, SMALL, monkeypatch)
    with torch.no_grad():
        ours = Reference(planted, arch).forward(tokens).logits
    assert departure(ours, theirs) > 10 * BOUND


def departure(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _gradients_by_release_name(twin: DeepseekV4ForCausalLM, arch: Architecture) -> Weights:
    state = {name: torch.zeros_like(tensor) for name, tensor in twin.state_dict().items()}
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            state[name] = parameter.grad
    return from_runtime(state, arch, "transformers")
