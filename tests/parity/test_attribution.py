"""Each source of drift planted alone ranks first, and the named sources explain the whole."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.weights import build_version
from services.trainer.engine.actor import Actor
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.job import Job
from shared.messages import TrainingSample, VersionSpan
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import write_release
from shared.parity.attribution import RUNGS, SOURCES, Attribution, attribute
from shared.parity.trace import TraceRequest
from shared.routes import (
    TokenRoutes,
    first_selecting_token,
    indexed_layers,
    num_entry_bytes,
    pack_bits,
    pack_routes,
)
from tests.integration.rollout_world import write_version
from tests.parity.engines import LENGTH, stored
from tests.parity.live_sides import job_of
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

PROMPT = 20
SEQUENCES = random_tokens(SMALL, rows=4, length=90).numpy()
FP8, FP32 = SMALL.with_format("fp8"), SMALL.with_format("fp32")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(SMALL, seed=11, spread=0.5)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("policy") / "release"
    write_release(path, FP32, weights)
    return path


def engine_of(arch: Architecture, weights: Mapping[str, Tensor], *, rounds: bool) -> EmbeddedEngine:
    engine = EmbeddedEngine(EngineSpec(arch, 4, LENGTH, rounds, 1))
    engine.scheduler.switch(build_version(0, arch, stored(arch, weights)), "in_place")
    return engine


def samples_of(engine: EmbeddedEngine, *, with_routes: bool = False) -> list[TrainingSample]:
    """What the engine would have recorded, had it sampled these tokens as version 0."""
    _, scores = engine.score([row.tolist() for row in SEQUENCES], 1.0, 0)
    routes = recorded_routes(engine) if with_routes else [None] * len(SEQUENCES)
    return [
        TrainingSample(
            rollout_id=f"job.g000000.{i}",
            group_id="job.g000000",
            token_ids=row.astype(np.int32),
            num_prompt_tokens=PROMPT,
            sampler_logprobs=score[PROMPT - 1 :].astype(np.float32),
            advantage=0.0,
            reward=0.0,
            oldest_version=0,
            version_spans=[VersionSpan(policy_version=0, num_tokens=len(row) - PROMPT)],
            routes=one,
        )
        for i, (row, score, one) in enumerate(zip(SEQUENCES, scores, routes, strict=True))
    ]


def recorded_routes(engine: EmbeddedEngine) -> list[bytes]:
    arch = engine.spec.arch
    asked = TraceRequest(
        sequences=[row[:-1] for row in SEQUENCES], points=["router", "attn.indexer"]
    )
    packed = []
    for states in engine.trace(asked).states:
        experts = [
            torch.from_numpy(states[f"layers.{layer}.router"].values.copy())
            .topk(arch.num_experts_per_tok, -1)
            .indices.numpy()
            for layer in range(arch.num_hidden_layers)
        ]
        bits = []
        for layer in indexed_layers(arch):
            kept = states[f"layers.{layer}.attn.indexer"].values.copy()
            kept[: first_selecting_token(arch)] = False
            bits.append(pack_bits(kept, num_entry_bytes(len(kept))))
        routes = TokenRoutes(np.stack(experts, 1).astype(np.uint8), np.stack(bits, 1))
        packed.append(pack_routes(routes))
    return packed


def attributed(
    actor: Actor, samples: list[TrainingSample], folders: Mapping[int, Path]
) -> Attribution:
    ladder = actor.climb(samples, temperature=1.0, folders=folders)
    sampler = np.concatenate([one.sampler_logprobs for one in samples]).astype(np.float64)
    return attribute(sampler, {name: np.asarray(ladder[name], np.float64) for name in RUNGS})


def assert_explained(found: Attribution, source: str) -> None:
    assert found.ranked[0][0] == source, found
    assert found.whole > 1e-3
    assert sum(found.parts.values()) == pytest.approx(found.whole, rel=1e-9)
    assert sum(found.parts[name] for name in SOURCES) == pytest.approx(found.whole, rel=0.1)
    assert found.parts[source] > 0.8 * found.whole


def test_quantisation_alone_ranks_first(weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_release(tmp_path / "fp8", FP8, weights)
    actor = Actor(job_of(tmp_path / "fp8"))
    samples = samples_of(engine_of(FP8, weights, rounds=True))
    assert_explained(attributed(actor, samples, {}), "quantisation")


def test_routing_flips_alone_rank_first(weights: dict[str, Tensor], release: Path) -> None:
    """The sampler's gate biases are off: they only select."""
    job = unrounded_job(release, replay={"routing": True, "indexer": True})
    generator = torch.Generator().manual_seed(1)
    flipped = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
        if name.endswith("gate.bias")
    }
    samples = samples_of(engine_of(FP32, weights | flipped, rounds=False), with_routes=True)
    assert_explained(attributed(Actor(job), samples, {}), "routing flips")


def test_staleness_alone_ranks_first(
    weights: dict[str, Tensor], release: Path, tmp_path: Path
) -> None:
    """The actor has trained on; version 0, which sampled, is in the store."""
    actor = Actor(unrounded_job(release))
    write_version(tmp_path / "v0", stored(FP32, weights), 0)
    samples = samples_of(engine_of(FP32, weights, rounds=False))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in release_tensors(actor.model):
            if weight.is_floating_point() and "gate" not in name and "indexer" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(0.01 * weight.std(correction=0) * noise)
    before = [weight.clone() for _, weight in release_tensors(actor.model)]
    assert_explained(attributed(actor, samples, {0: tmp_path / "v0"}), "staleness")
    after = [weight for _, weight in release_tensors(actor.model)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def unrounded_job(release: Path, **actor: object) -> Job:
    job = job_of(release, **actor)
    rollout = job.rollout.model_copy(update={"weights": "float32", "quantise_activations": False})
    return job.model_copy(update={"rollout": rollout})


def test_choices_made_again_change_nothing_where_nothing_drifts(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """Masters off the FP8 grid: choices are those of the published values, not of the masters."""
    write_release(tmp_path / "fp8", FP8, weights)
    actor = Actor(job_of(tmp_path / "fp8", quantisation="full"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in release_tensors(actor.model):
            if weight.is_floating_point() and "scale" not in name:
                weight.add_(
                    0.02 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
                )
    trained = {name: weight.clone() for name, weight in release_tensors(actor.model)}
    samples = samples_of(engine_of(FP8, trained, rounds=True))
    ladder = actor.climb(samples, temperature=1.0, folders={})
    assert np.abs(ladder["selected"] - ladder["quantised"]).max() < 1e-4


def test_parts_of_a_made_up_ladder_add_up() -> None:
    ladder = {name: np.array([-1.0 + 0.1 * i, -2.0 - 0.2 * i]) for i, name in enumerate(RUNGS)}
    found = attribute(np.array([-0.5, -3.0]), ladder)
    assert found.whole == pytest.approx((0.5 + 1.0) / 2)
    assert found.parts == pytest.approx({**dict.fromkeys(SOURCES, 0.15), "rest": 0.15})
    assert found.explained_share == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no token"):
        attribute(np.array([np.nan]), {name: np.array([0.0]) for name in RUNGS})
