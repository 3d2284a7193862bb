"""An actor that rounds as its sampler: what it runs on, its gradients, and its own weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer import checkpoint
from services.trainer.engine import schedule
from services.trainer.engine.actor import Actor
from services.trainer.engine.rounding import rounded_weights
from services.trainer.export import export_version
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.errors import Rejected
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, quantise_tensor, write_release
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import RELEASE, SERVED, ActivationQuant
from shared.quant.policy import POLICIES
from shared.weights.manifest import Manifest, shard_file
from tests.parity.float64_actor import float64, float64_actor
from tests.parity.test_actor_step import FROZEN, batch, held, job, twin_step, weights
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, random_tokens, random_weights

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of load:UserWarning"),
]

ARCH = replace(DEMO, swiglu_limit=10.0)
STORED = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@pytest.fixture(scope="module", params=["fp8", "fp4"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def document(form: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Masters off the sampler's grid: the actor starts from FP32 weights, the sampler has codes."""
    root = tmp_path_factory.mktemp(form)
    for name, stored in (("sampler", form), ("actor", "fp32")):
        write_release(root / name, ARCH.with_format(stored), weights())
    model = {
        "rollout_checkpoint": str(root / "sampler"),
        "actor_checkpoint": str(root / "actor"),
    }
    given = job(root, actor={"quantisation": "weights"})
    return given.model_dump() | {"model": model}


def new_actor(document: dict[str, Any], **actor: Any) -> Actor:
    return Actor(Job.model_validate(document | {"actor": document["actor"] | actor}))


def published(form: str) -> dict[str, Tensor]:
    return {name: rounding(form)(name, weight) for name, weight in weights().items()}


def rounding(form: str) -> Any:
    def published_value(name: str, weight: Tensor) -> Tensor:
        return dequantised(quantise_tensor(name, weight, policy=POLICIES[form]))[name]

    return published_value


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference_logprobs(arch: Architecture, values: dict[str, Tensor], ids: Tensor) -> Tensor:
    logits = Reference(values, arch).forward(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def test_scores_are_those_of_the_published_weights(document: dict[str, Any], form: str) -> None:
    actor = new_actor(document)
    before = held(actor)
    (ids,) = random_tokens(ARCH, rows=1, length=60)
    ours = torch.from_numpy(actor.score([ids.numpy()])[0])
    assert (ours - reference_logprobs(ARCH, published(form), ids)).abs().max() <= 2e-5
    assert (ours - reference_logprobs(ARCH, before, ids)).abs().max() > 1e-2
    assert equal(held(actor), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_runs_on_what_its_version_exports(
    document: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = new_actor(document, dtype=dtype)
    used: list[dict[str, Tensor]] = []
    run = schedule.forward_backward

    def spied(model: Any, *arguments: Any, **named: Any) -> Any:
        used.append(held(actor))
        result = run(model, *arguments, **named)
        assert equal(held(actor), used[-1])
        return result

    monkeypatch.setattr(schedule, "forward_backward", spied)
    for step in (1, 2):
        values = exported(actor, tmp_path / str(step))
        masters = held(actor)
        actor.train_step(batch(step))
        assert equal({name: value.float() for name, value in used[-1].items()}, values)
        assert not equal(used[-1], masters)
        assert not equal(held(actor), masters)


def exported(actor: Actor, path: Path) -> dict[str, Tensor]:
    """FP32 values by release name, read back from the files of an export."""
    path.mkdir()
    manifest: Manifest = export_version(
        release_tensors(actor.model),
        path,
        job_id="test",
        policy_version=actor.policy_version,
        policy=actor.policy,
        max_shard_bytes=2**20,
    )
    stored = {}
    for entry in manifest.tensors:
        body = (path / shard_file(entry.shard)).read_bytes()
        blob = bytearray(body[entry.offset : entry.offset + entry.num_bytes])
        flat = torch.frombuffer(blob, dtype=torch.uint8).view(STORED[entry.dtype])
        stored[entry.name] = flat.view(entry.shape)
    return {name: value.float() for name, value in dequantised(stored).items()}


def test_gradients_go_straight_through_to_the_masters(document: dict[str, Any], form: str) -> None:
    actor = new_actor(document)
    before = held(actor)
    metrics = actor.train_step(batch())
    expected, loss, norm = twin_step("sequence_mean", rounding=rounding(form))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in held(actor).items():
        if any(part in name for part in FROZEN):
            assert torch.equal(tensor, before[name]), name
            continue
        moved = (expected[name] - before[name]).norm()
        # Adam's first step is the sign of the gradient, so a rounding near zero can turn one value.
        assert (tensor - expected[name]).norm() <= 0.02 * moved, name


def test_a_replay_from_a_checkpoint_is_equal_to_the_bit(
    document: dict[str, Any], tmp_path: Path
) -> None:
    first, second = new_actor(document), new_actor(document)
    first.train_step(batch(1))
    progress = {"step": 1, "policy_version": 1}
    path = tmp_path / "step1"
    checkpoint.save(path, model=first.model, optimizer=first.optimizer, progress=progress)
    checkpoint.load(path, model=second.model, optimizer=second.optimizer)
    results = [actor.train_step(batch(2)) for actor in (first, second)]
    assert results[0]["loss"] == results[1]["loss"]
    assert equal(held(first), held(second))


def test_refusals_and_errors_leave_the_masters(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = new_actor(document)
    before = held(actor)
    poison = [s.model_copy(update={"advantage": 3e38}) for s in batch().samples]
    with pytest.raises(Rejected, match="the weights are unchanged"):
        actor.train_step(batch().model_copy(update={"samples": poison}))
    assert equal(held(actor), before)

    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(schedule, "score", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        actor.score([batch().samples[0].token_ids])
    assert equal(held(actor), before)


def test_a_weight_that_is_no_number_is_named_and_nothing_stays_rounded(
    document: dict[str, Any],
) -> None:
    actor = new_actor(document)
    last = dict(release_tensors(actor.model))["layers.3.ffn.experts.1.w2.weight"]
    last[0, 0] = float("nan")
    before = held(actor)
    with (
        pytest.raises(ValueError, match=r"layers.3.ffn.experts.1.w2.weight: NaN"),
        rounded_weights(actor.model, actor.policy),
    ):
        pass
    after = held(actor)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_a_sampler_of_unrounded_weights_has_an_actor_of_unrounded_weights(
    document: dict[str, Any],
) -> None:
    plain = new_actor(document | {"rollout": {"weights": "float32"}})
    before = held(plain)
    with rounded_weights(plain.model, plain.policy):
        assert equal(held(plain), before)


# ------------------------------------------------------------------ activations


@pytest.mark.usefixtures("float64_turns")
@pytest.mark.parametrize("quant", [RELEASE, SERVED], ids=["release", "served"])
@pytest.mark.parametrize(("arch", "length"), [(SMALL, 300), (DEMO, 150), (ALIGNED, 150)])
def test_rounded_activations_equal_the_reference_in_float64(
    arch: Architecture, length: int, quant: ActivationQuant
) -> None:
    """In FP32 a sum in another order flips codes; here an equal rounding gives equal logits."""
    values = float64(random_weights(arch, seed=3))
    tokens = random_tokens(arch, rows=2, length=length)
    with torch.no_grad():
        model = float64_actor(arch, values)
        ours, plain = model(tokens, quant=quant), model(tokens)
        theirs = Reference(values, arch, quant=quant).forward(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    assert (ours - plain).abs().max() > 1e-2 * theirs.abs().max()


@pytest.mark.usefixtures("float64_turns")
def test_gradients_go_straight_through_rounded_activations() -> None:
    values = float64(random_weights(SMALL, seed=9))
    tokens = random_tokens(SMALL, rows=1, length=150)
    cotangent = torch.randn(1, 150, SMALL.vocab_size, generator=torch.Generator().manual_seed(7))
    model = float64_actor(SMALL, values)
    (model(tokens, quant=RELEASE) * cotangent).sum().backward()
    leaves = {n: w.requires_grad_(w.is_floating_point()) for n, w in values.items()}
    logits = Reference(leaves, SMALL, quant=RELEASE).forward(tokens).logits
    (logits * cotangent).sum().backward()
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    compared = 0
    for name, ours in release_tensors(model):
        if (theirs := leaves[name].grad) is not None and ".indexer." not in name:
            assert (ours - theirs).norm() <= 1e-9 * theirs.norm(), name
            compared += 1
    assert compared > 100


@pytest.mark.usefixtures("float64_turns")
def test_mtp_rounds_its_projections() -> None:
    values = float64(random_weights(ALIGNED, seed=3))
    tokens = random_tokens(ALIGNED, rows=1, length=40)
    with torch.no_grad():
        reference = Reference(values, ALIGNED, quant=RELEASE)
        streams = reference.forward(tokens).streams
        theirs = reference.mtp(streams, tokens).logits
        model = float64_actor(ALIGNED, values)
        ours = model.mtp_logits(streams.flatten(0, 1), tokens, quant=RELEASE)
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_rounding_is_that_of_the_sampler(
    document: dict[str, Any], form: str, dtype: str
) -> None:
    """Few tokens meet a flipped code in FP32, most do in BF16; the median of all is bounded."""
    (ids,) = random_tokens(ARCH, rows=1, length=60)
    with torch.no_grad():
        logits = Reference(published(form), ARCH, quant=RELEASE).forward(ids[None]).logits
    theirs = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    def distance(**actor: Any) -> Tensor:
        rows = new_actor(document, dtype=dtype, **actor).score([ids.numpy()])
        return (torch.from_numpy(rows[0]) - theirs).abs().median()

    assert distance(quantisation="full") <= (1e-4 if dtype == "float32" else 0.05)
    assert distance(quantisation="weights") > 1e-3


def test_a_fully_rounded_step_moves_the_masters(document: dict[str, Any]) -> None:
    actor = new_actor(document, quantisation="full")
    before = held(actor)
    metrics = actor.train_step(batch())
    assert metrics["grad_norm"] > 0
    assert not equal(held(actor), before)


def test_a_sampler_that_rounds_no_activations_has_an_actor_that_rounds_none(
    document: dict[str, Any],
) -> None:
    sampler = {"rollout": {"quantise_activations": False}}
    full = new_actor(document | sampler, quantisation="full")
    ids = batch().samples[0].token_ids
    assert (full.score([ids])[0] == new_actor(document).score([ids])[0]).all()
