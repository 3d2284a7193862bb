"""A keeper on ranks without a model, for tests of launch and watchdog on one host and two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.entries import Draw
from services.trainer.events import EventLog, event_maker
from services.trainer.keeper import RankKeeper
from services.trainer.launch import LaunchBoard
from services.trainer.ranks import RankDeadlines, Ranks
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample

NUM_RANKS = 4
PROGRAM = ("-m", "tests.integration.rank_program")
STAGES = ("-m", "tests.integration.stage_program")


def make_job(*, stall_s: float, **sections: Any) -> Job:
    """Four ranks, between which the experts are spread, or layers as `parallel` says."""
    return Job.model_validate(
        {
            "name": "test",
            "steps": 4,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 24},
            "cluster": {"gpus_per_node": NUM_RANKS, **sections.get("cluster", {})},
            "actor": {
                "parallel": sections.get("parallel", {"expert": NUM_RANKS}),
                "env": {"NCCL_DEBUG": "WARN", **sections.get("env", {})},
                "watchdog": {"stall_s": stall_s, "collective_timeout_s": 120.0},
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
    """A keeper of a job, with the books that it restores from."""

    def __init__(
        self,
        run_dir: Path,
        job: Job,
        program: tuple[str, ...] = PROGRAM,
        make_batch: Callable[[int], TrainingBatch] = batch,
    ) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self._make_batch = make_batch
        self.books = Books(run_dir / BOOKS_FILE)
        self.record = EventLog(run_dir, self.books)
        self.board = LaunchBoard(list(program))
        self.keeper = RankKeeper(
            lambda: Ranks.start(
                job_id="test-0000",
                job=job,
                run_dir=run_dir,
                deadlines=RankDeadlines(),
                board=self.board,
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
            body=self._make_batch(number).pack(),
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
