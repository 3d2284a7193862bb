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
from shared.parity.judge import MARGINS
from shared.parity.live_walk import walk_sides
from shared.parity.trace import TraceRounding
from tests.integration.test_weight_store import batch
from tests.parity.live_sides import SamplerSide, TrainerSide

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
    loaded: list[LoadedVersion] = []
    proofs: list[Proven] = []
    medians: list[list[float]] = []  # |engine minus actor|, of each sequence in each version
    for version in range(STEPS + 1):
        await exporter.export(version)
        server.load(store.path(version), version)
        assert server.scheduler.version is not None
        loaded.append(server.scheduler.version)
        probe = store.probe(version)
        assert probe is not None
        scores = server.score(PROMPTS, 1.0, None)[1]
        proofs.append(prove(version, probe, scores, anchor=proofs[0] if proofs else None))
        pairs = zip(scores, probe.sequences, strict=True)
        medians.append([float(np.median(np.abs(ours - one.logprobs))) for ours, one in pairs])
        for prompt in PROMPTS:  # but for codes at a boundary, every block gives the same
            sides = TrainerSide(unrounded, version), SamplerSide(server)
            margin = MARGINS["float32"]
            walked = await walk_sides(*sides, unrounded.architecture, prompt, margin=margin)
            assert walked.result.first is None
        unrounded.train_step(batch(unrounded, version + 1))
    books.close()
    # Sums in another order differ by their last bits. Where that moves a value over the boundary of
    # two codes, what follows in its sequence moves by 0.01 and more: in one sequence of twenty.
    # Scored unrounded, every one of them is off by 0.05 to 0.2.
    assert np.min(medians, axis=0).max() < 1e-4  # each sequence agrees in some version
    assert np.min(medians, axis=1).max() < 1e-4  # in each version some sequence agrees
    first, last = loaded[0].derived, loaded[-1].derived
    last.blocks[len(last.blocks) // 2 :] = first.blocks[len(first.blocks) // 2 :]
    anchor = min(proofs[:-1], key=lambda one: one.mean_abs_delta)  # one without such a code
    probe, scores = proofs[-1].probe, server.score(PROMPTS, 1.0, None)[1]
    with pytest.raises(WeightsCorrupt, match="the engine did not move as the trainer did"):
        prove(STEPS, probe, scores, anchor=anchor)
