"""Ranks that stand still: noticed from outside, explained, ended, and the job goes on."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.entries import Draw
from services.trainer.events import EventLog, event_maker
from services.trainer.keeper import RankKeeper
from services.trainer.launch import RECORD_FILE, LaunchBoard
from services.trainer.ranks import RankDeadlines, Ranks
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample

pytestmark = pytest.mark.timeout(180)
NUM_RANKS = 4
STALL_S = 4.0
PROGRAM = ["-m", "tests.integration.rank_program"]


def make_job() -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 4,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 24},
            "cluster": {"gpus_per_node": NUM_RANKS},
            "actor": {
                "parallel": {"expert": NUM_RANKS},
                "env": {"NCCL_DEBUG": "WARN"},
                "watchdog": {"stall_s": STALL_S, "collective_timeout_s": 120.0},
            },
        }
    )


def batch(step: int) -> TrainingBatch:
    sample = TrainingSample(
        rollout_id=f"g{step}.0",
        group_id=f"g{step}",
        token_ids=np.arange(12),
        num_prompt_tokens=6,
        sampler_logprobs=np.full(6, -2.0),
        advantage=1.0,
        reward=1.0,
        oldest_version=step - 1,
    )
    return TrainingBatch(
        job_id="test-0000",
        step=step,
        policy_version=step - 1,
        temperature=1.0,
        samples=[sample],
        group_ids=[f"g{step}"],
    )


class Run:
    """A keeper on ranks without a model."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        self.books = Books(run_dir / BOOKS_FILE)
        self.record = EventLog(run_dir, self.books)
        board = LaunchBoard(PROGRAM)
        self.keeper = RankKeeper(
            lambda: Ranks.start(
                job_id="test-0000",
                job=make_job(),
                run_dir=run_dir,
                deadlines=RankDeadlines(),
                board=board,
            ),
            books=self.books,
            run_dir=run_dir,
            keep_checkpoints=1,
            record=self.record,
            events=event_maker("test-0000", "trainer-0"),
        )

    async def step(self, number: int) -> dict:
        draw = self.books.next_draw()
        self.books.record_draws([Draw(draw, f"d{draw}", 0)])
        self.books.commit_batch(
            number,
            body=batch(number).pack(),
            group_ids=[f"d{draw}"],
            policy_version=number,
            batch_facts={},
        )
        result = await self.keeper.train(number)
        self.books.keep_result(number, result)
        return result

    def beacon(self, rank: int) -> dict:
        return json.loads((self.run_dir / "watchdog" / f"rank{rank}.json").read_text())

    def pid(self, rank: int) -> int:
        return self.beacon(rank)["pid"]

    async def close(self) -> None:
        await self.keeper.close()
        self.record.close()
        self.books.close()


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    await run.close()


async def test_a_stopped_rank_is_named_and_the_job_goes_on(run: Run) -> None:
    await run.keeper.restore()
    _check_record(run)
    await run.step(1)
    await run.keeper.save(1)
    await run.step(2)
    stopped = run.pid(2)
    stepping = asyncio.create_task(run.step(3))
    async with asyncio.timeout(60):
        while run.beacon(2)["step"] != 3:  # noqa: ASYNC110 # another process writes it
            await asyncio.sleep(0.01)
    os.kill(stopped, signal.SIGSTOP)
    result = await stepping
    # Every step once: checkpoint 1, replayed 2 and 3.
    assert (result["step"], result["sum"]) == (3, NUM_RANKS * (1 + 2 + 3))
    assert not psutil.pid_exists(stopped)
    events = {body["name"]: body["fields"] for _, body in run.books.journal(0)}
    assert list(events) == ["checkpoint_saved", "ranks_stalled", "rank_restarted", "replayed"]
    assert events["replayed"]["steps"] == [2, 3]
    stalled = events["ranks_stalled"]
    assert stalled["waiting"]["collective"] == "gloo:all_to_all"
    assert stalled["waiting"]["group"] == "experts"
    assert (stalled["waiting"]["arrived"], stalled["waiting"]["missing"]) == ([0, 1, 3], [2])
    assert stalled["states"] == {"2": "stopped (SIGSTOP)"}
    assert (stalled["op"], stalled["phase"], stalled["step"]) == (
        "train_step",
        "forward_backward",
        3,
    )
    (report,) = (run.run_dir / "watchdog").glob("stall-*.json")
    stacks = json.loads(report.read_text())["stacks"]
    assert "all_to_all_single" in stacks["rank0"]


def _check_record(run: Run) -> None:
    """What was started is written down, and is what the ranks got."""
    record = json.loads((run.run_dir / RECORD_FILE).read_text())
    assert record["environment"]["NCCL_DEBUG"] == "WARN"
    assert record["environment"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert record["environment"]["TANDEM_COLLECTIVE_TIMEOUT_S"] == "120"
    environment = psutil.Process(run.pid(3)).environ()
    assert record["environment"].items() <= environment.items()
    assert record["command"][1:3] == ["-m", "torch.distributed.run"]
