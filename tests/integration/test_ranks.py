"""The keeper on real ranks: killed in mid-run, they come back bit-equal from checkpoint and log."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.disk import Unwritable
from services.trainer.entries import Draw
from services.trainer.events import EventLog, event_maker
from services.trainer.keeper import LeftForPause, RankKeeper, StepRefused
from services.trainer.ranks import RankDeadlines, Ranks, RanksLost
from services.trainer.run_environment import read_environment
from services.trainer.versions import VersionStore
from shared.errors import RemoteError
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.architecture import Architecture
from shared.spans import Span
from shared.weights.manifest import shard_file

pytestmark = pytest.mark.timeout(180)
POLICY = Path("assets/tiny-dsv4").resolve()


def make_job(checkpoint: Path = POLICY, *, pipeline: int = 1) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 4,
            "model": {"rollout_checkpoint": str(checkpoint)},
            "data": {"path": "unused.jsonl"},
            "sampling": {"context_length": 64, "max_response_tokens": 24},
            "bounds": {"max_mean_abs_delta_logprob": 100.0},
            "cluster": {"gpus_per_node": pipeline},
            "actor": {
                "parallel": {"pipeline": pipeline},
                "dtype": "float32",
                "max_tokens_per_gpu": 512,
                "optimizer": {"learning_rate": 1e-3},
            },
        }
    )


def batch(step: int, *, broken: bool = False) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = [
        TrainingSample(
            rollout_id=f"g{step}.{index}",
            group_id=f"g{step}",
            token_ids=rng.integers(1, 250, 12),
            num_prompt_tokens=6,
            sampler_logprobs=np.full(6, np.nan if broken else -2.0),
            advantage=float(index * 2 - 1),
            reward=float(index),
            oldest_version=step - 1,
        )
        for index in range(2)
    ]
    return TrainingBatch(
        job_id="test-0000",
        step=step,
        policy_version=step - 1,
        temperature=1.0,
        samples=samples,
        group_ids=[f"g{step}"],
    )


class Run:
    """A keeper on real ranks, with the books that it restores from."""

    def __init__(self, run_dir: Path, *, pipeline: int = 1) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        self.books = Books(run_dir / BOOKS_FILE)
        self.record = EventLog(run_dir, self.books)
        self.store = VersionStore(run_dir)
        self.keeper = RankKeeper(
            lambda: Ranks.start(
                job_id="test-0000",
                job=make_job(pipeline=pipeline),
                run_dir=run_dir,
                deadlines=RankDeadlines(),
            ),
            books=self.books,
            run_dir=run_dir,
            keep_checkpoints=1,
            record=self.record,
            events=event_maker("test-0000", "trainer-0"),
        )

    async def step(self, number: int, *, broken: bool = False) -> dict:
        draw = self.books.next_draw()
        self.books.record_draws([Draw(draw, f"d{draw}", 0)])
        self.books.commit_batch(
            number,
            body=batch(number, broken=broken).pack(),
            group_ids=[f"d{draw}"],
            policy_version=number,
            batch_facts={},
        )
        result = await self.keeper.train(number)
        self.books.keep_result(number, result)
        return result

    async def checksums(self, version: int) -> list[str]:
        await self.keeper.export(version, self.store.fresh_path(version))
        manifest = self.store.manifest(version)
        assert manifest is not None
        return [tensor.checksum for tensor in manifest.tensors]

    async def close(self) -> None:
        await self.keeper.close()
        self.record.close()
        self.books.close()


def kill_ranks() -> None:
    """kill -9 of every rank process that this test started."""
    for child in psutil.Process().children(recursive=True):
        if "services.trainer.learner" in child.cmdline() and "--nnodes" not in child.cmdline():
            os.kill(child.pid, signal.SIGKILL)


@pytest_asyncio.fixture
async def run(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    run = Run(tmp_path / "run", **getattr(request, "param", {}))
    yield run
    await run.close()


@pytest.mark.parametrize("run", [{"pipeline": 2}], indirect=True)
async def test_a_save_cut_short_by_kill_is_never_chosen(run: Run) -> None:
    """One checkpoint is written while training goes on, the next one is not finished."""
    await run.keeper.restore()
    await run.step(1)
    await run.keeper.save(1, wait=False)
    await run.step(2)
    deadline_s = time.monotonic() + 20
    while not run.keeper.complete_checkpoints():
        assert time.monotonic() < deadline_s, "the checkpoint of step 1 is not there after 20 s"
        await run.keeper.score([[1, 2, 3, 4]], temperature=1.0)
    before = await run.checksums(2)
    await run.keeper.save(2, wait=False)
    kill_ranks()
    folder = run.keeper.complete_checkpoints()[0][1].parent
    assert (folder / ".step00000002.building").exists()
    assert await run.checksums(2) == before
    assert [step for step, _ in run.keeper.complete_checkpoints()] == [1]
    assert [path.name for path in folder.iterdir()] == ["step00000001"]
    kept = Books(Path(shutil.copy(folder / "step00000001" / BOOKS_FILE, folder.parent / "copy")))
    assert (kept.last_step(), kept.next_draw()) == (1, 1)
    kept.close()
    hashed = json.loads((folder / "step00000001" / "integrity.json").read_text())["files"]
    assert BOOKS_FILE in hashed
    await run.step(3)
    (folder / ".step00000003.building").touch()  # where the ranks need a folder
    with pytest.raises(Unwritable, match=r"step00000003 cannot be written: .*File exists.* bytes"):
        await run.keeper.save(3, wait=False)
    events = [body["name"] for _, body in run.books.journal(0)]
    assert events == ["checkpoint_saved", "rank_restarted", "replayed"]  # no rank was lost for it


async def test_killed_ranks_come_back_bit_equal(run: Run) -> None:
    await run.keeper.restore()
    result = await run.step(1)
    assert result["delta_logprob_mean"] >= 0
    assert set(result["seconds"]) >= {"forward_backward", "optimizer"}
    await run.keeper.save(1)
    await run.step(2)
    await run.step(3)
    before = await run.checksums(3)
    kill_ranks()
    assert await run.checksums(3) == before
    events = [body["name"] for _, body in run.books.journal(0)]
    assert events == ["checkpoint_saved", "rank_restarted", "replayed"]
    with pytest.raises(StepRefused, match="step 4 was refused"):
        await run.step(4, broken=True)
    assert await run.checksums(3) == before
    (scores,) = await run.keeper.score([[1, 2, 3, 4]], temperature=1.0)
    assert len(scores) == 3
    await run.keeper.close()
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in left if "services.trainer.learner" in line]


async def test_ranks_that_cannot_start_say_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((RemoteError, RanksLost), match=r"config\.json"):
        await Ranks.start(
            job_id="test-0000",
            job=make_job(tmp_path / "empty"),
            run_dir=tmp_path,
            deadlines=RankDeadlines(),
        )
    assert not [
        child
        for child in psutil.Process().children(recursive=True)
        if "services.trainer.learner" in child.cmdline()
    ]


async def test_nothing_is_left_of_ranks_whose_start_a_pause_breaks_off(run: Run) -> None:
    def started() -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE and "--nnodes" in child.cmdline()
        ]

    coming = asyncio.create_task(run.keeper.restore())
    async with asyncio.timeout(20):
        while not started():  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.02)
    run.keeper.pause_asked.set()
    with pytest.raises(LeftForPause):
        await asyncio.wait_for(coming, 20)
    assert started() == []


@pytest.mark.parametrize("run", [{"pipeline": 2}], indirect=True)
async def test_every_rank_tells_what_it_did_and_what_it_runs_with(run: Run) -> None:
    await run.keeper.restore()
    assert [one["spans"] for one in await run.keeper.spans(1000)] == [[], []]
    await run.step(1)
    told = await run.keeper.spans(0)
    await run.step(2)
    assert [one["spans"] for one in await run.keeper.spans(0)] == [[], []]
    assert len({one["pid"] for one in told}) == 2
    for one in told:
        assert (one["dropped"], one["clock_ahead_ns"], one["clock_uncertainty_ns"]) == (0, 0, 0)
        spans = {span.name: span for span in (Span(*told) for told in one["spans"])}
        step, phase = spans["train_step"], spans["forward_backward"]
        assert spans.keys() >= {"forward", "optimizer"}
        assert "spans" not in spans
        assert step.begin_ns <= phase.begin_ns <= phase.end_ns <= step.end_ns
    (first, second) = (
        {span[0]: span for span in one["spans"]}["train_step"] for one in told
    )  # one step: neither ends before the other begins
    assert max(first[2], second[2]) < min(first[3], second[3])
    environment = read_environment(run.run_dir)
    assert environment.keys() == {"rank0", "rank1"}
    assert {one["pid"] for one in environment.values()} == {one["pid"] for one in told}


@pytest.mark.parametrize("run", [{"pipeline": 2}], indirect=True)
async def test_ranks_say_what_they_published_as_a_server_loads_it(run: Run) -> None:
    """Each of its own part; of a file that is damaged or gone they say so, and live on."""
    await run.keeper.restore()
    await run.checksums(0)
    folder, manifest = run.store.path(0), run.store.manifest(0)
    assert manifest is not None
    assert manifest.num_parts == 2
    spec = EngineSpec(Architecture.load(POLICY), 2, 64, True, num_threads=1)
    word = await run.keeper.effective_checksum(folder)
    assert word == EmbeddedEngine(spec).load(folder, 0)
    entry = next(one for one in manifest.tensors if one.name == "layers.1.ffn.gate.weight")
    shard = folder / shard_file(entry.shard)
    content = bytearray(shard.read_bytes())
    content[entry.offset] ^= 1
    shard.write_bytes(content)
    with pytest.raises(RemoteError, match=f"WeightsCorrupt: .*{entry.name} is not what was"):
        await run.keeper.effective_checksum(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"the shard of .* is not here"):
        await run.keeper.effective_checksum(folder)
    content[entry.offset] ^= 1
    shard.write_bytes(content)
    assert await run.keeper.effective_checksum(folder) == word
    assert list(run.books.journal(0)) == []
