"""A job that the trainer dies over ends after a few times; one that is only restarted goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.config import TrainerConfig
from services.trainer.entries import Draw
from services.trainer.jobs.runner import MAX_ATTEMPTS, JobRunner
from services.trainer.jobs.store import JobStore, StoredJob
from services.trainer.keeper import StartRanks
from services.trainer.prompts import group_id
from services.trainer.ranks import RankSet
from shared.http import HttpClient
from shared.job import Job
from tests.integration.conductor_world import Crash
from tests.integration.test_trainer_api import make_config, running


@pytest.fixture
def config(tmp_path: Path, redis_url: str, redis: Redis) -> TrainerConfig:
    return make_config(tmp_path, redis_url)


@pytest.fixture
def store(config: TrainerConfig):
    store = JobStore(config.runs_dir)
    yield store
    store.close()


def commit_step(books: Books, job_id: str) -> int:
    """One more step, as an earlier process would have made it."""
    draw, step = books.next_draw(), books.last_step() + 1
    name = group_id(job_id, draw)
    books.record_draws([Draw(draw, name, 0)])
    facts = {"tokens": 1, "reward_raw": 0.0}
    books.commit_batch(step, body=None, group_ids=[name], policy_version=0, batch_facts=facts)
    books.keep_result(step, {})
    return step


def add_job(config: TrainerConfig, store: JobStore, root: Path, *, num_steps: int) -> str:
    """A queued job whose books have so many steps."""
    document = {
        "name": "test",
        "steps": 9,
        "model": {"rollout_checkpoint": str(root / "policy")},
        "data": {"path": str(root / "rows.jsonl")},
        "sampling": {"context_length": 32, "max_response_tokens": 8},
        "preflight": {"enabled": False},
    }
    job_id = store.add(Job.model_validate(document))[0].job_id
    run_dir = config.runs_dir / job_id
    run_dir.mkdir()
    books = Books(run_dir / BOOKS_FILE)
    for _ in range(num_steps):
        commit_step(books, job_id)
    books.close()
    return job_id


async def die(
    redis: Redis, config: TrainerConfig, store: JobStore, *, before: Callable[[JobRunner], None]
) -> None:
    """One process whose ranks' start kills it, once the runner has looked at the job again."""

    def begin(_: StoredJob, __: Path) -> StartRanks:
        async def start() -> RankSet:
            before(runner)
            runner.look()
            for _ in range(100):  # turns of the event loop: the runner's loop needs a few
                await asyncio.sleep(0)
            raise Crash("the process dies")

        return start

    async with HttpClient() as http:
        runner = JobRunner(
            redis, store=store, config=config, http=http, shards_url="", begin_ranks=begin
        )
        with pytest.raises(Crash):
            await asyncio.wait_for(runner.run(asyncio.Event()), 20)


@pytest.mark.parametrize("num_steps", [0, 2])
async def test_a_job_that_kills_the_trainer_fails_however_far_it_had_come(
    redis: Redis, config: TrainerConfig, store: JobStore, tmp_path: Path, num_steps: int
) -> None:
    job_id = add_job(config, store, tmp_path, num_steps=num_steps)
    for deaths in range(1, MAX_ATTEMPTS + 1):
        await die(redis, config, store, before=lambda _: None)
        assert (store.get(job_id).state, store.get(job_id).attempts) == ("running", deaths)
    async with running(config, tmp_path) as trainer:
        status = await trainer.until_state(job_id, "failed")
    assert "died 4 times in a row, and the job made no step between" in status["error"]


async def test_deaths_with_steps_between_are_forgiven(
    redis: Redis, config: TrainerConfig, store: JobStore, tmp_path: Path
) -> None:
    job_id = add_job(config, store, tmp_path, num_steps=1)

    def take_a_step(runner: JobRunner) -> None:
        assert runner.active is not None
        parts = runner.active.parts
        parts.progress.step = commit_step(parts.books, job_id)

    for attempts in (1, 2, 2):
        await die(redis, config, store, before=lambda _: None)
        assert store.get(job_id).attempts == attempts
        await die(redis, config, store, before=take_a_step)
        assert store.get(job_id).attempts == 1


async def test_a_job_goes_on_however_often_the_trainer_is_restarted(
    config: TrainerConfig, store: JobStore, tmp_path: Path
) -> None:
    """A deployment is no death, also of a job that makes no step for a long time."""
    job_id = add_job(config, store, tmp_path, num_steps=1)
    for _ in range(MAX_ATTEMPTS + 2):
        async with running(config, tmp_path) as trainer:
            await trainer.until_state(job_id, "running")
            async with asyncio.timeout(60):
                while trainer.app.state.runner.active is None:  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.02)
        assert (store.get(job_id).state, store.get(job_id).attempts) == ("running", 0)
