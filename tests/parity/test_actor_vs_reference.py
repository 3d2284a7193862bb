"""The trainer's Megatron model against the reference: logits, gradients, hidden states, scores."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from services.trainer.models.deepseek_v4.weights import load_weights, release_tensors
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import trace_points, weight_shapes
from shared.models.deepseek_v4.reference import Reference
from shared.models.deepseek_v4.runtimes import to_runtime
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED, random_tokens, random_weights

Weights = dict[str, Tensor]

LENGTH = 300  # two entries of 128, dozens of 4, several windows and query chunks
BOUND = 2e-5  # of the largest logit
GRADIENT_BOUND = 1e-4  # of the norm of each gradient
MODELS = {"aligned": ALIGNED, "small": SMALL, "demo": DEMO, "unscaled": UNSCALED}


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield
    parallel.leave()


def actor(arch: Architecture, weights: Weights, *, dtype: str = "float32") -> DeepSeekV4:
    model = DeepSeekV4(transformer_config(arch, dtype=dtype), arch, freeze_router=False)
    load_weights(model, weights)
    return model


def departure(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_reference(name: str, spread: float) -> None:
    arch = MODELS[name]
    weights = random_weights(arch, seed=3, spread=spread)
    tokens = random_tokens(arch, rows=2, length=LENGTH)
    with torch.no_grad():
        ours = actor(arch, weights)(tokens)
        theirs = Reference(weights, arch).forward(tokens).logits
    assert departure(ours, theirs) <= BOUND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_reference(name: str) -> None:
    arch = MODELS[name]
    # Gradients jump where a value is within rounding of the clamp; this seed has no such value.
    weights = random_weights(arch, seed=9)
    tokens = random_tokens(arch, rows=1, length=LENGTH)
    cotangent = torch.randn(1, LENGTH, arch.vocab_size, generator=torch.Generator().manual_seed(7))

    model = actor(arch, weights)
    (model(tokens) * cotangent).sum().backward()
    leaves = {n: w.requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    (Reference(leaves, arch).forward(tokens).logits * cotangent).sum().backward()

    ours, compared = gradients(model), 0
    for tensor, weight in leaves.items():
        if weight.grad is None:
            assert tensor.endswith("tid2eid") or not ours[tensor].any(), tensor
            continue
        error = (ours[tensor] - weight.grad).norm() / weight.grad.norm()
        assert error <= GRADIENT_BOUND, f"{tensor}: {error}"
        compared += 1
    assert compared > 100


def gradients(model: DeepSeekV4) -> Weights:
    """Gradients by release name, zero where there is none."""
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    return dict(release_tensors(model))


def test_mtp_logits_equal_reference() -> None:
    weights = random_weights(ALIGNED, seed=3)
    tokens = random_tokens(ALIGNED, rows=2, length=160)
    following = random_tokens(ALIGNED, rows=2, length=160, seed=2)
    with torch.no_grad():
        reference = Reference(weights, ALIGNED)
        streams = reference.forward(tokens).streams
        theirs = reference.mtp(streams, following).logits
        ours = actor(ALIGNED, weights).mtp_logits(streams.flatten(0, 1), following)
    assert departure(ours, theirs) <= BOUND


@pytest.mark.parametrize("name", ["aligned", "small"])
def test_hidden_states_carry_the_common_names_and_equal_reference(name: str) -> None:
    arch = MODELS[name]
    weights = random_weights(arch, seed=3)
    tokens = random_tokens(arch, rows=2, length=LENGTH)
    theirs: Weights = {}
    trace = Trace(states={})
    with torch.no_grad():
        Reference(weights, arch).forward(tokens, trace=theirs.__setitem__)
        actor(arch, weights)(tokens, trace=trace)
    assert trace.states is not None
    assert sorted(trace.states) == sorted(trace_points(arch))
    for point in trace_points(arch):
        ours, right = trace.states[point].float(), theirs[point].float()
        ours = ours.view(right.shape)
        assert torch.equal(ours.isneginf(), right.isneginf()), point  # entries not seen
        seen = right > -torch.inf
        assert departure(ours[seen], right[seen]) <= BOUND, point


def test_actor_keeps_every_tensor_where_its_column_of_names_says() -> None:
    weights = random_weights(ALIGNED, seed=4)
    state = actor(ALIGNED, weights).state_dict()
    kept = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    expected = to_runtime(weights, ALIGNED, "megatron")
    assert kept.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(kept[name].reshape(value.shape), value), name


def test_round_trip_by_release_names_is_exact() -> None:
    weights = random_weights(ALIGNED, seed=4)
    back = dict(release_tensors(actor(ALIGNED, weights)))
    assert back.keys() == weight_shapes(ALIGNED).keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_padding_and_neighbours_change_nothing() -> None:
    lengths = (300, 131, 7)
    weights = random_weights(SMALL, seed=3)
    model = actor(SMALL, weights)
    tokens = random_tokens(SMALL, rows=3, length=304)
    with torch.no_grad():
        together = model(tokens)
        for row, length in enumerate(lengths):
            alone = model(tokens[row : row + 1, :length])
            assert departure(together[row, :length], alone[0]) <= BOUND


def test_scores_equal_log_softmax_at_temperature() -> None:
    weights = random_weights(SMALL, seed=3)
    model = actor(SMALL, weights)
    tokens = random_tokens(SMALL, rows=2, length=40)
    positions = torch.tensor([3, 17, 39, 40, 78])
    labels = torch.tensor([5, 0, 511, 9, 100])
    with torch.no_grad():
        scores = model(tokens, positions_N=positions, labels_N=labels, temperature=0.7)
        expected = (model(tokens).flatten(0, 1)[positions].double() / 0.7).log_softmax(-1)
    picked = expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores.logprobs.double(), picked, rtol=0, atol=2e-5)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=0, atol=2e-5)


def test_replayed_routes_are_obeyed_with_current_scores() -> None:
    weights = random_weights(DEMO, seed=3)
    tokens = random_tokens(DEMO, rows=2, length=64)
    recorded: dict[int, Tensor] = {}
    with torch.no_grad():
        free = actor(DEMO, weights)(tokens, routes=Routes(record=recorded))
        assert sorted(recorded) == [0, 1, 2, 3]
        biased = weights | {"layers.2.ffn.gate.bias": weights["layers.2.ffn.gate.bias"].flip(0)}
        model = actor(DEMO, biased)
        assert departure(model(tokens), free) > 0.01
        assert departure(model(tokens, routes=Routes(replay=recorded)), free) <= BOUND


def test_bf16_keeps_exact_tensors_in_fp32() -> None:
    weights = random_weights(DEMO, seed=3)
    model = actor(DEMO, weights, dtype="bfloat16")
    exact = ("_fn", "_base", "_scale", "attn_sink", "ape", "gate.bias")
    for name, tensor in release_tensors(model):
        if name.endswith("tid2eid"):
            assert tensor.dtype == torch.int64
        else:
            expected = torch.float32 if name.endswith(exact) else torch.bfloat16
            assert tensor.dtype == expected, name


def test_bf16_log_probabilities_stay_near_fp32() -> None:
    """Selections may flip in BF16, so the mean is bounded and not the maximum."""
    weights = random_weights(DEMO, seed=3, spread=0.5)
    tokens = random_tokens(DEMO, rows=4, length=64)
    rounded = {
        name: weight.bfloat16().float() if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    with torch.no_grad():
        exact = actor(DEMO, rounded)(tokens).log_softmax(-1)
        ours = actor(DEMO, rounded, dtype="bfloat16")(tokens).log_softmax(-1)
    assert (ours - exact).abs().mean() < 0.1


def test_indexer_and_selection_bias_are_frozen() -> None:
    model = actor(DEMO, random_weights(DEMO, seed=3))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (
            ".indexer." not in name and not name.endswith("gate.bias")
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.1.attn.wq_b.weight"), "layers.1.attn.wq_b.weight.*found none"),
        (lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight: expected.*found \[3\]"),
        (
            lambda w: w.update({"layers.0.ffn.gate.tid2eid": torch.ones(320, 2)}),
            "tid2eid: expected torch.int64, found torch.float32",
        ),
    ],
)
def test_wrong_weights_are_refused_by_name(change: object, message: str) -> None:
    weights = random_weights(DEMO, seed=3)
    change(weights)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        actor(DEMO, weights)
