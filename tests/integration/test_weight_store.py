"""Any of the last fifty versions can be served again, and then computes what it computed before.

The versions are the demo job's own: its model, its optimiser, one step between each and the next.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.trainer.engine.actor import Actor
from services.trainer.export import export_version
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.weights import release_tensors
from services.trainer.versions import VersionStore
from shared.job import Job, load_job_file
from shared.messages import TrainingBatch, TrainingSample
from shared.weights.protocol import CommitUpdate

KEPT = 50
LAST_FIFTY = range(1, KEPT + 1)

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture(scope="module")
def actor() -> Iterator[Actor]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield Actor(Job.model_validate(load_job_file(Path("configs/demo.toml"))))
    parallel.leave()


@pytest.mark.timeout(300)  # 40 s where nothing else runs
def test_any_of_the_last_fifty_versions_is_served_again_with_an_equal_effective_checksum(
    actor: Actor, tmp_path: Path
) -> None:
    store, engine = VersionStore(tmp_path), new_engine(actor)
    for version in range(KEPT + 1):
        publish(store, actor, version)
        if version in LAST_FIFTY:
            store.keep_effective(version, serve(engine, store, version))
        store.tidy({version}, keep_last=KEPT, keep_bytes=2**40)
        actor.train_step(batch(actor, version + 1))
    kept = {one.policy_version: one for one in store.describe()}
    assert set(LAST_FIFTY) <= set(kept)
    noted = {store.effective(version) for version in LAST_FIFTY}
    assert len(noted) == len(LAST_FIFTY)
    whole = kept[KEPT].stored_bytes
    assert sum(one.stored_bytes for one in kept.values()) < 0.6 * KEPT * whole
    for version in LAST_FIFTY[::-1]:
        store.restore(version)
        assert serve(engine, store, version) == store.effective(version)
        store.tidy({KEPT}, keep_last=KEPT, keep_bytes=2**40)


def new_engine(actor: Actor) -> EmbeddedEngine:
    spec = EngineSpec(actor.architecture, 2, 64, quantise_activations=True, num_threads=1)
    return EmbeddedEngine(spec)


def publish(store: VersionStore, actor: Actor, version: int) -> None:
    base = store.newest_whole()
    export_version(
        release_tensors(actor.model),
        store.fresh_path(version),
        job_id="test",
        policy_version=version,
        policy=actor.policy,
        max_shard_bytes=2**20,
        base=None if base is None else store.path(base),
    )


def serve(engine: EmbeddedEngine, store: VersionStore, version: int) -> str:
    """The effective checksum of what a server loads; it refuses another than the one noted."""
    manifest = store.manifest(version)
    assert manifest is not None
    commit = CommitUpdate(effective_checksum=store.effective(version))
    result, _ = engine.activate(manifest, store.path(version), commit)
    return str(result["effective_checksum"])


def batch(actor: Actor, step: int) -> TrainingBatch:
    """Two groups of two sampled just now; one of each is the better one."""
    generator = np.random.default_rng(step)
    size = actor.architecture.vocab_size
    tokens = [generator.integers(5, size, 14).astype(np.int32) for _ in range(4)]
    samples = [
        TrainingSample(
            rollout_id=f"g{number // 2}.{number % 2}",
            group_id=f"g{number // 2}",
            token_ids=one,
            num_prompt_tokens=6,
            sampler_logprobs=scores[5:],
            advantage=1.0 if number % 2 else -1.0,
            reward=float(number % 2),
            oldest_version=step - 1,
        )
        for number, (one, scores) in enumerate(zip(tokens, actor.score(tokens), strict=True))
    ]
    return TrainingBatch(
        job_id="test",
        step=step,
        policy_version=step - 1,
        temperature=1.0,
        samples=samples,
        group_ids=["g0", "g1"],
    )
