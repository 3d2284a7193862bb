"""One whole training step of the Megatron actor against a plain PyTorch twin on the reference."""

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from services.trainer import checkpoint
from services.trainer.disk import Unwritable
from services.trainer.engine.actor import Actor
from services.trainer.megatron import cpu, parallel
from services.trainer.megatron.tracker import MemoryTracker
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.errors import LeftHalfway, Rejected, WeightsCorrupt
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.checkpoint import write_release
from shared.models.deepseek_v4.reference import Reference
from tests.tiny_deepseek_v4 import DEMO, random_weights

Weights = dict[str, Tensor]
Rounding = Callable[[str, Tensor], Tensor]

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of load:UserWarning"),
]

FROZEN = (".indexer.", ".gate.")
LEARNING_RATE, DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.98), 0.05


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "release"
    write_release(path, replace(DEMO, swiglu_limit=10.0).with_format("fp32"), weights())
    return path


def weights() -> Weights:
    return random_weights(DEMO, seed=3, spread=0.5)


def job(release: Path, *, budget: int = 256, algorithm: Any = None, actor: Any = None) -> Job:
    optimizer = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": DECAY,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "clip_grad": CLIP,
    }
    return Job.model_validate(
        {
            "name": "test",
            "steps": 3,
            "model": {"rollout_checkpoint": str(release)},
            "data": {"path": "unused.jsonl"},
            "sampling": {"context_length": 64, "max_response_tokens": 24},
            "algorithm": algorithm or {},
            "bounds": {"max_mean_abs_delta_logprob": 10.0},
            "actor": {
                "dtype": "float32",
                "max_tokens_per_gpu": budget,
                "optimizer": optimizer,
                **(actor or {}),
            },
        }
    )


def batch(step: int = 1) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = []
    for index in range(8):
        prompt, response = int(rng.integers(4, 12)), int(rng.integers(1, 24))
        logprobs = -5.5 + rng.normal(size=response).astype(np.float32)
        if index == 3:
            logprobs[0] = np.nan
        samples.append(
            TrainingSample(
                rollout_id=f"g{index // 4}.{index % 4}",
                group_id=f"g{index // 4}",
                token_ids=rng.integers(0, DEMO.vocab_size, prompt + response),
                num_prompt_tokens=prompt,
                sampler_logprobs=logprobs,
                advantage=float(rng.normal()),
                reward=float(index % 2),
                oldest_version=step - 1,
            )
        )
    return TrainingBatch(
        job_id="test",
        step=step,
        policy_version=step - 1,
        temperature=0.8,
        samples=samples,
        group_ids=["g0", "g1"],
    )


def held(actor: Actor) -> Weights:
    return {name: tensor.clone() for name, tensor in release_tensors(actor.model)}


def _as_it_is(name: str, weight: Tensor) -> Tensor:
    return weight


def twin_step(aggregation: str, *, rounding: Rounding = _as_it_is) -> tuple[Weights, float, float]:
    """One step: weights, loss, norm."""
    leaves, found = twin_steps([batch()], aggregation=aggregation, rounding=rounding)
    return leaves, *found[0]


def twin_steps(
    batches: list[TrainingBatch],
    *,
    aggregation: str = "token_mean",
    rounding: Rounding = _as_it_is,
    eps: float = 1e-8,
) -> tuple[Weights, list[tuple[float, float]]]:
    """Sequence by sequence on the reference, torch's clipping and AdamW: weights; losses and norms.

    The reference runs on rounded weights, and what they get as gradients is the leaves'.
    """
    leaves = weights()
    trained = [name for name in leaves if not any(part in name for part in FROZEN)]
    vectors = [leaves[name] for name in trained if leaves[name].dim() == 1]
    matrices = [leaves[name] for name in trained if leaves[name].dim() > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": vectors, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": DECAY},
        ],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=eps,
    )
    found = []
    for drawn in batches:
        used = {name: rounding(name, leaf).clone() for name, leaf in leaves.items()}
        for name in trained:
            used[name].requires_grad_()
        loss = twin_loss(used, drawn, aggregation)
        loss.backward()
        for name in trained:  # an expert without tokens decays like any other
            grad = used[name].grad
            leaves[name].grad = torch.zeros_like(leaves[name]) if grad is None else grad
        norm = torch.nn.utils.clip_grad_norm_([leaves[name] for name in trained], CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return {name: leaf.detach() for name, leaf in leaves.items()}, found


def twin_loss(used: Weights, drawn: TrainingBatch, aggregation: str) -> Tensor:
    losses, counts = [], []
    arch = replace(DEMO, swiglu_limit=10.0)
    for sample in drawn.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = Reference(used, arch).forward(ids[None]).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        new = logprobs[sample.num_prompt_tokens - 1 :]
        sampler = torch.tensor(sample.sampler_logprobs)
        usable = sampler.isfinite()
        weight = (new.detach() - sampler).exp().clamp(max=2.0).where(usable, 0)
        ratio = (new - new.detach()).exp()
        losses.append((-ratio * sample.advantage * weight).where(usable, 0).sum())
        counts.append(int(usable.sum()))
    if aggregation == "token_mean":
        return torch.stack(losses).sum() / sum(counts)
    means = [one / count for one, count in zip(losses, counts, strict=True)]
    return torch.stack(means).mean()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_step_equals_its_plain_twin(release: Path, aggregation: str) -> None:
    actor = Actor(job(release, algorithm={"aggregation": aggregation}))
    before = held(actor)
    metrics = actor.train_step(batch())
    expected, loss, norm = twin_step(aggregation)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["bad_logprobs"] == 1
    for name, tensor in held(actor).items():
        if any(part in name for part in FROZEN):
            assert torch.equal(tensor, before[name]), name
            continue
        moved = (expected[name] - before[name]).norm()
        # Adam's first step is the sign of the gradient, so a rounding near zero can turn one value.
        assert (tensor - expected[name]).norm() <= 0.02 * moved, name


def test_three_steps_of_the_distributed_optimizer_equal_plain_adamw(release: Path) -> None:
    """An `eps` above rounding noise: no sign of a gradient near zero decides."""
    eps = 1e-5
    document = job(release, algorithm={"aggregation": "token_mean"}).model_dump()
    document["actor"]["optimizer"]["eps"] = eps
    actor, batches = Actor(Job.model_validate(document)), [batch(step) for step in (1, 2, 3)]
    before = held(actor)
    expected, found = twin_steps(batches, eps=eps)
    for drawn, (loss, norm) in zip(batches, found, strict=True):
        metrics = actor.train_step(drawn)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in held(actor).items():
        if not any(part in name for part in FROZEN):
            moved = (expected[name] - before[name]).norm()
            assert (tensor - expected[name]).norm() <= 1e-3 * moved, name


def test_a_smaller_token_budget_takes_less_memory_and_the_same_step(release: Path) -> None:
    """One micro-batch against one sequence each: the peak above what is kept between steps."""
    eps = {"optimizer": {"learning_rate": LEARNING_RATE, "clip_grad": CLIP, "eps": 1e-5}}
    whole, pieces = (Actor(job(release, budget=size, actor=eps)) for size in (2048, 64))
    metrics, peaks = [], []
    for actor in (whole, pieces):
        with MemoryTracker() as tracker:
            metrics.append(actor.train_step(batch()))
        peaks.append(tracker.peak_bytes - tracker.live_bytes)
    one, many = metrics
    assert (one["micro_batches"], many["micro_batches"]) == (1, 4)
    assert peaks[0] > 2 * peaks[1]
    for name in ("loss", "grad_norm", "entropy", "delta_logprob_mean", "tis_weight_mean"):
        assert many[name] == pytest.approx(one[name], rel=1e-4), name
    start, together = weights(), held(whole)
    for name, tensor in held(pieces).items():
        if any(part in name for part in FROZEN):
            continue
        moved = (together[name] - start[name]).norm()
        assert (tensor - together[name]).norm() <= 1e-3 * moved, name


def test_equal_starts_and_batches_give_equal_bits(release: Path) -> None:
    actors = [Actor(job(release)) for _ in range(2)]
    for step in (1, 2):
        results = [actor.train_step(batch(step)) for actor in actors]
    assert results[0]["loss"] == results[1]["loss"]
    one, other = (held(actor) for actor in actors)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_metrics_by_hand_on_policy(release: Path) -> None:
    """Sampler log-probabilities that are the actor's own: no drift, all TIS weights 1."""
    actor = Actor(job(release))
    drawn = batch()
    rows = actor.score([s.token_ids for s in drawn.samples], temperature=drawn.temperature)
    samples = [
        sample.model_copy(update={"sampler_logprobs": row[sample.num_prompt_tokens - 1 :]})
        for sample, row in zip(drawn.samples, rows, strict=True)
    ]
    metrics = actor.train_step(drawn.model_copy(update={"samples": samples}))
    assert metrics["delta_logprob_max"] < 1e-5
    assert metrics["tis_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_share"] == metrics["tis_truncated_share"] == 0.0
    assert 0 < metrics["entropy"] <= math.log(DEMO.vocab_size)


def test_learning_rate_warms_up(release: Path) -> None:
    settings = {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 4}}
    actor = Actor(job(release, actor=settings))
    rates = [actor.train_step(batch(step))["learning_rate"] for step in (1, 2)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3])


def test_actor_starts_from_a_megatron_checkpoint(release: Path, tmp_path: Path) -> None:
    first = Actor(job(release))
    first.train_step(batch())
    progress = {"step": 1, "policy_version": 1}
    checkpoint.save(
        tmp_path / "step1", model=first.model, optimizer=first.optimizer, progress=progress
    )
    model = {"rollout_checkpoint": str(release), "actor_checkpoint": str(tmp_path / "step1")}
    second = Actor(Job.model_validate(job(release).model_dump() | {"model": model}))
    one, other = held(first), held(second)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert second.step == 0


def test_a_trained_router_moves_when_asked(release: Path) -> None:
    actor = Actor(job(release, actor={"freeze_router": False}))
    before = held(actor)
    actor.train_step(batch())
    after = held(actor)
    assert not torch.equal(after["layers.2.ffn.gate.weight"], before["layers.2.ffn.gate.weight"])
    assert torch.equal(after["layers.2.ffn.gate.bias"], before["layers.2.ffn.gate.bias"])


@pytest.mark.parametrize("updates", [1, 2])
def test_a_policy_far_from_the_samplers_is_not_trained(release: Path, updates: int) -> None:
    document = job(release, algorithm={"updates_per_batch": updates}).model_dump()
    document["bounds"]["max_mean_abs_delta_logprob"] = 0.1
    actor = Actor(Job.model_validate(document))
    before = held(actor)
    with pytest.raises(Rejected, match=r"mean \|delta log p\|.*= 0.1; the weights are unchanged"):
        actor.train_step(batch())
    assert all(torch.equal(before[name], tensor) for name, tensor in held(actor).items())
    assert actor.train_step(batch(), is_replay=True)["delta_logprob_mean"] > 0.1  # as it once was


def test_a_refused_step_can_be_followed_by_a_good_one(release: Path) -> None:
    actor, untouched = Actor(job(release)), Actor(job(release))
    poison = [s.model_copy(update={"advantage": 3e38}) for s in batch().samples]
    with pytest.raises(Rejected, match="the weights are unchanged"):
        actor.train_step(batch().model_copy(update={"samples": poison}))
    actor.train_step(batch())
    untouched.train_step(batch())
    one, other = held(actor), held(untouched)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_later_update_that_is_not_finite_is_refused_as_left_halfway(release: Path) -> None:
    """Sample i belongs to update i modulo 2."""
    actor = Actor(job(release, algorithm={"updates_per_batch": 2}))
    before = held(actor)
    poison = [
        sample.model_copy(update={"advantage": 3e38 if place % 2 else sample.advantage})
        for place, sample in enumerate(batch().samples)
    ]
    with pytest.raises(LeftHalfway, match=r"step 1: .* after the step's first update"):
        actor.train_step(batch().model_copy(update={"samples": poison}))
    assert actor.step == 0
    assert not all(torch.equal(before[name], tensor) for name, tensor in held(actor).items())


REINFORCE_PLUS = {"name": "reinforce_plus_plus", "kl": {"coefficient": 0.5}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl": {"coefficient": 0.5}},
        {"kl": {"coefficient": 0.5, "estimator": "unbiased"}, "updates_per_batch": 2},
        REINFORCE_PLUS,
    ],
)
def test_the_reference_stays_what_the_job_began_with(release: Path, algorithm: Any) -> None:
    """The first step is at the reference: no KL, and the same update as without one."""
    actor = Actor(job(release, algorithm=algorithm))
    first, second = actor.train_step(batch()), actor.train_step(batch(2))
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["reference_kl"] > 1e-6


def test_after_a_warm_up_the_reference_is_what_it_made(release: Path, tmp_path: Path) -> None:
    """Also for an actor that resumes behind it; one that cannot know it does not guess."""
    document = job(release, algorithm={"kl": {"coefficient": 0.5}}).model_dump(mode="json")
    document["warm_up"] = {"path": "unused", "steps": 1}
    one = Actor(Job.model_validate(document))
    one.train_step(batch().model_copy(update={"supervised": True}))
    saved = {"model": one.model, "optimizer": one.optimizer}
    for step in (1, 2):
        state = {"step": step, "policy_version": step}
        if step == 2:
            assert one.train_step(batch(2))["reference_kl"] == pytest.approx(0.0, abs=1e-9)
        checkpoint.save(tmp_path / f"step{step}", progress=state, **saved)
    other, guessing = Actor(Job.model_validate(document)), Actor(Job.model_validate(document))
    other.load_reference(tmp_path / "step1")
    for actor in (other, guessing):
        checkpoint.load(tmp_path / "step2", model=actor.model, optimizer=actor.optimizer)
        actor.step = 2
    found = other.train_step(batch(3))["reference_kl"]
    assert found == one.train_step(batch(3))["reference_kl"] > 1e-6
    with pytest.raises(RuntimeError, match="at step 2 the weights are not the reference policy's"):
        guessing.train_step(batch(3))


def test_a_resumed_actor_has_the_same_reference(release: Path, tmp_path: Path) -> None:
    document = job(release, algorithm={"kl": {"coefficient": 0.5}})
    one = Actor(document)
    one.train_step(batch())
    state = {"step": 1, "policy_version": 1}
    checkpoint.save(tmp_path / "step1", model=one.model, optimizer=one.optimizer, progress=state)
    other = Actor(document)
    checkpoint.load(tmp_path / "step1", model=other.model, optimizer=other.optimizer)
    assert other.train_step(batch(2))["reference_kl"] == one.train_step(batch(2))["reference_kl"]


def test_a_distance_in_the_reward_moves_the_update(release: Path) -> None:
    """At the reference it costs nothing; from the second step on it does."""
    without = Actor(job(release, algorithm={"name": "reinforce_plus_plus"}))
    with_kl = Actor(job(release, algorithm=REINFORCE_PLUS))
    for step in (1, 2):
        losses = [actor.train_step(batch(step))["loss"] for actor in (without, with_kl)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_every_algorithm_takes_a_step(release: Path, name: str) -> None:
    actor = Actor(job(release, algorithm={"name": name}))
    before = held(actor)
    metrics = actor.train_step(batch())
    assert math.isfinite(metrics["loss"])
    assert metrics["grad_norm"] > 0
    after = held(actor)
    assert any(not torch.equal(before[tensor], after[tensor]) for tensor in before)


def test_equal_rewards_change_nothing_but_decay(release: Path) -> None:
    """Zero advantages: no gradient, whatever the sampler's log-probabilities say."""
    actor = Actor(job(release))
    equal = [s.model_copy(update={"advantage": 0.0}) for s in batch().samples]
    metrics = actor.train_step(batch().model_copy(update={"samples": equal}))
    assert metrics["loss"] == metrics["grad_norm"] == 0.0


def test_a_checkpoint_has_the_generators(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's, the device's (here the same one) and those that Megatron tracks."""
    actor = Actor(job(release))
    saved: dict[str, Any] = {"model": actor.model, "optimizer": actor.optimizer}
    checkpoint.save(tmp_path / "step1", progress={"step": 1, "policy_version": 1}, **saved)
    expected = [drawn() for _ in range(2)]
    checkpoint.load(tmp_path / "step1", **saved)
    assert [drawn() for _ in range(2)] == expected
    read = checkpoint._read

    def of_an_older_form(*asked: Any) -> dict[str, Any]:
        return {key: value for key, value in read(*asked).items() if key != "generators"}

    monkeypatch.setattr(checkpoint, "_read", of_an_older_form)
    with pytest.raises(WeightsCorrupt, match="no generators"):
        checkpoint.load(tmp_path / "step1", **saved)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "cause"),
    [
        (Path, "mkdir", "No space left on device"),
        (os, "fsync", "rank 0: .*OSError"),
        (checkpoint, "save_integrity_manifest", "No space left on device"),
        (shutil, "disk_usage", r"it has [\d,]{7,} bytes"),
    ],
    ids=["before", "while it is written", "after", "too little room"],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_finds_no_room_is_given_up_whole(
    release: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    cause: str,
    background: bool,
) -> None:
    actor = Actor(job(release))
    saved: dict[str, Any] = {"model": actor.model, "optimizer": actor.optimizer}
    progress, writer = {"step": 1, "policy_version": 1}, checkpoint.Writer()
    little = shutil.disk_usage(tmp_path)._replace(free=100_000)

    def write(background: bool) -> None:
        writer.start(tmp_path / "step1", progress=progress, copy=background, **saved)
        while not writer.finish(wait=not background):
            time.sleep(0.01)  # leave the writer the interpreter

    with monkeypatch.context() as patched:
        patched.setattr(module, name, full if module is not shutil else lambda _: little)
        with pytest.raises(Unwritable, match=rf"step1 cannot be written: .*{cause}.* \([\d,]+ b"):
            write(background)
    assert list(tmp_path.iterdir()) == []
    assert writer.finish(wait=True)
    write(background)
    assert checkpoint.load(tmp_path / "step1", **saved) == progress


def drawn() -> list[float]:
    with get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [float(torch.rand(())), float(torch.rand((), device=cpu.device())), tracked]


@pytest.mark.parametrize("recompute", [{"mode": "selective"}, {"mode": "full"}])
def test_recomputed_activations_change_memory_and_nothing_else(
    release: Path, recompute: dict[str, Any]
) -> None:
    """The kept bytes fall with every block that recomputes; weights are equal to the bit."""
    settings = [{"mode": "none"}, recompute | {"num_blocks": 2}, recompute]
    actors = [
        Actor(job(release, budget=2048, actor={"recompute": setting})) for setting in settings
    ]
    kept = [kept_bytes(actor) for actor in actors]
    assert kept[0] > 1.3 * kept[1]
    assert kept[1] > 1.3 * kept[2]
    held_after = [held(actor) for actor in actors]
    for other in held_after[1:]:
        assert all(torch.equal(other[name], value) for name, value in held_after[0].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimiser_gives_the_same_weights(
    release: Path, tmp_path: Path, dtype: str
) -> None:
    """Three steps, with a checkpoint after the second that goes on with another fraction."""
    after = []
    for fraction, overlap, resumed in [(0.0, True, 0.5), (0.5, True, 1.0), (1.0, False, 0.0)]:
        first = Actor(offloading(release, dtype, fraction, overlap))
        for step in (1, 2):
            first.train_step(batch(step))
        place, progress = tmp_path / f"{fraction}", {"step": 2, "policy_version": 2}
        checkpoint.save(place, model=first.model, optimizer=first.optimizer, progress=progress)
        second = Actor(offloading(release, dtype, resumed, overlap))
        checkpoint.load(place, model=second.model, optimizer=second.optimizer)
        for actor in (first, second):
            actor.train_step(batch(3))
            after.append(held(actor))
        assert first.optimizer.param_groups[0]["lr"] == LEARNING_RATE
    before = weights()["head.weight"].to(after[0]["head.weight"].dtype)
    assert (after[0]["head.weight"] - before).abs().max() > LEARNING_RATE
    for other in after[1:]:
        for name, tensor in after[0].items():
            assert (other[name].float() - tensor.float()).abs().max() <= 1e-6, name


def test_the_host_takes_at_least_its_fraction_of_the_state(release: Path) -> None:
    """At most one parameter more; with overlap each has its own step."""
    for fraction, overlap in [(0.5, True), (1.0, False)]:
        actor = Actor(offloading(release, "bfloat16", fraction, overlap))
        for part in actor.optimizer.chained_optimizers:
            inner = part.optimizer
            all_sizes = [p.numel() for group in inner.param_groups for p in group["params"]]
            host = [p.numel() for p in inner.cpu_copys_map_gpu_param]
            assert fraction * sum(all_sizes) <= sum(host)
            assert sum(host) < fraction * sum(all_sizes) + max(all_sizes)
            groups = len(inner.cpu_param_groups)
            assert len(inner.cpu_optimizers) == (len(host) if overlap else min(groups, 1))
            assert (inner.gpu_optimizer is None) == (fraction == 1.0)
            assert len(inner.state) == len(all_sizes)
            masters = [state["master_param"] for state in inner.state.values()]
            assert {master.dtype for master in masters} == {torch.float32}


def offloading(release: Path, dtype: str, fraction: float, overlap: bool) -> Job:
    document = job(release, actor={"dtype": dtype}).model_dump()
    document["actor"]["optimizer"]["offload"] = {"fraction": fraction, "overlap": overlap}
    return Job.model_validate(document)


def kept_bytes(actor: Actor) -> int:
    """Of activations in one step, storages counted once."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in actor.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actor.train_step(batch())
    return sum(kept.values())


def test_small_bf16_updates_add_up_in_fp32_masters(release: Path) -> None:
    """Steps far below a BF16 weight's resolution are not lost, and gradients are summed in FP32."""
    slow = {"dtype": "bfloat16", "optimizer": {"learning_rate": 2e-5, "clip_grad": 1.0}}
    actor = Actor(job(release, actor=slow))
    buffers = [*actor.wrapped.buffers, *actor.wrapped.expert_parallel_buffers]
    assert {buffer.grad_dtype for buffer in buffers} == {torch.float32}
    first = held(actor)["head.weight"]
    assert first.dtype == torch.bfloat16
    steps = 8
    moved = []
    for step in range(1, steps + 1):
        actor.train_step(batch(1).model_copy(update={"step": step}))
        moved.append((held(actor)["head.weight"] != first).float().mean().item())
    large = first.abs() > 0.02  # half a unit in the last place is 4e-5 or more
    after = held(actor)["head.weight"]
    assert moved[0] < 0.5 * moved[-1]
    assert (after[large] != first[large]).float().mean() > 0.3


def test_supervised_steps_raise_the_likelihood_of_their_responses(release: Path) -> None:
    """The loss of a first step is the mean negative log-likelihood, and then it falls."""
    document = job(release).model_dump()
    document["warm_up"] = {"path": "unused", "steps": 2, "learning_rate": 5e-4}
    actor = Actor(Job.model_validate(document))
    given = batch()
    examples = [
        sample.model_copy(
            update={
                "advantage": 1.0,
                "sampler_logprobs": 0 * np.nan_to_num(sample.sampler_logprobs),
            }
        )
        for sample in given.samples
    ]
    given = given.model_copy(update={"samples": examples, "supervised": True})
    rows = actor.score([s.token_ids for s in examples], temperature=given.temperature)
    scores = [row[s.num_prompt_tokens - 1 :] for row, s in zip(rows, examples, strict=True)]
    metrics = actor.train_step(given)
    assert metrics["loss"] == pytest.approx(-np.concatenate(scores).mean(), rel=1e-4)
    assert metrics["learning_rate"] == 5e-4
    assert "delta_logprob_mean" not in metrics
    second = given.model_copy(update={"step": 2, "policy_version": 1})
    assert actor.train_step(second)["loss"] < metrics["loss"] - 0.05
