"""A probe is scored as the servers round, however the actor trains.

Where an actor trains unrounded weights, quantisation moves log-probabilities by more than many
steps do: a server that kept old state, and gives no weights back to be compared, would hide there.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.probing import Proven, prove
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.weights import LoadedVersion
from services.trainer.books import Books
from services.trainer.engine.actor import Actor
from services.trainer.export import export_version
from services.trainer.exports import Exporter
from services.trainer.keeper import RankKeeper
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.weights import release_tensors
from services.trainer.versions import VersionStore
from shared.errors import WeightsCorrupt
from shared.job import Job, load_job_file
from shared.parity.trace import TraceRounding
from tests.integration.test_weight_store import batch

STEPS = 4
PROMPTS = [list(range(5, 69)), [7, 30, 11, 2] * 16, list(range(60, 10, -1))]

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture
def unrounded() -> Iterator[Actor]:
    """The demo's actor, as a job has it that says nothing of quantisation."""
    document = load_job_file(Path("configs/demo.toml"))
    document["actor"] = {"dtype": "float32", "optimizer": {"learning_rate": 1e-4}}
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield Actor(Job.model_validate(document))
    parallel.leave()


class OwnRanks(RankKeeper):
    """One rank in this process."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    async def export(self, version: int, path: Path, base: Path | None = None) -> None:
        export_version(
            release_tensors(self._actor.model),
            path,
            job_id="test",
            policy_version=version,
            policy=self._actor.policy,
            max_shard_bytes=2**20,
            base=base,
        )

    async def score(  # type: ignore[override]
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        rounding: TraceRounding = "own",
    ) -> list[list[float]]:
        arrays = [np.array(one, np.int32) for one in sequences]
        scores = self._actor.score(arrays, temperature=temperature, rounding=rounding)
        return [one.tolist() for one in scores]


async def test_old_state_does_not_hide_behind_an_actor_that_rounds_nothing(
    unrounded: Actor, tmp_path: Path
) -> None:
    update, store, books = unrounded.job.update, VersionStore(tmp_path), Books(tmp_path / "books")
    exporter = Exporter(OwnRanks(unrounded), store, books=books, update=update, prompts=PROMPTS)
    server = EmbeddedEngine(EngineSpec(unrounded.architecture, 2, 64, True, num_threads=1))
    anchor: Proven | None = None
    loaded: list[LoadedVersion] = []
    means: list[float] = []
    for version in range(STEPS + 1):
        await exporter.export(version)
        server.load(store.path(version), version)
        assert server.scheduler.version is not None
        loaded.append(server.scheduler.version)
        probe = store.probe(version)
        assert probe is not None
        scores = server.score(PROMPTS, 1.0, None)[1]
        proven = prove(version, probe, scores, anchor=anchor)
        # Of the same policy, computed twice: but for what follows a code that fell to the other
        # side, which some processors' last bits make one do.
        ours = np.concatenate([one.logprobs for one in probe.sequences])
        assert np.median(np.abs(ours - np.concatenate(scores))) < 1e-4
        means.append(proven.mean_abs_delta)
        anchor = anchor or proven
        unrounded.train_step(batch(unrounded, version + 1))
    books.close()
    assert sorted(means)[-2] < 0.01  # at most one version has such a code
    first, last = loaded[0].derived, loaded[-1].derived
    last.blocks[len(last.blocks) // 2 :] = first.blocks[len(first.blocks) // 2 :]
    with pytest.raises(WeightsCorrupt, match="since version 0 the engine did not move"):
        prove(STEPS, probe, server.score(PROMPTS, 1.0, None)[1], anchor=anchor)
