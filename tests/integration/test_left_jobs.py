"""Jobs that are paused or cancelled in every phase: whole books, and a resume that goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.conductor import Conductor
from services.trainer.steps import EndState, JobPaused
from shared import topology
from shared.tasks import end
from tests.integration.conductor_world import JOB_ID, World, make_job, run_to_end, running_world
from tests.integration.test_conductor import POINTS, check_books, check_streams_empty


@pytest.mark.parametrize("point", POINTS)
async def test_a_pause_in_every_phase_loses_nothing(
    redis: Redis, tmp_path: Path, point: str
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        conductor = world.conductor()
        conductor._on_point = lambda now: now == point and conductor.pause_asked.set()
        with pytest.raises(JobPaused, match="paused on request"):
            await asyncio.wait_for(conductor.run(), 20)
        await conductor.close("paused")
        await run_to_end(world)
        check_books(world).close()
        await check_streams_empty(redis)


@pytest.mark.parametrize("point", POINTS)
async def test_a_cancel_in_every_phase_leaves_whole_books(
    redis: Redis, tmp_path: Path, point: str
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        conductor = world.conductor()
        reached = asyncio.Event()
        conductor._on_point = lambda now: now == point and reached.set()
        running = asyncio.create_task(conductor.run())
        await asyncio.wait_for(reached.wait(), 20)
        await end(running)
        await conductor.close("cancelled")
        books = Books(world.run_dir / BOOKS_FILE)
        counts = books.counts()
        assert counts["trained"] == 3 * books.last_step()
        assert sum(counts[state] for state in ("open", "trained", "dropped")) == books.next_draw()
        books.close()
        assert (await world.announced()).state == "finished"


def act_in(conductor: Conductor, phase: str, act: Callable[[], None]) -> None:
    """Have `act` happen while the conductor is in that phase, for the first time."""
    parts, done = conductor.parts, asyncio.Event()
    holder, name = {
        "restore": (parts.keeper, "restore"),
        "warm-up": (parts.keeper, "train"),
        "preflight": (parts.preflight, "run"),
        "collecting": (parts.collector, "take"),
        "committing": (parts.publisher, "wait_served"),
        "evaluating": (parts.evals, "wait_all"),
    }[phase]
    original = getattr(holder, name)

    async def acting(*args: Any, **named: Any) -> Any:
        if not done.is_set():
            done.set()
            act()
            if phase not in ("restore", "warm-up"):  # a job that is left waits for nobody else
                await asyncio.sleep(60)
        return await original(*args, **named)

    setattr(holder, name, acting)


async def left_in(world: World, phase: str, ended: EndState) -> None:
    """A run that is paused or cancelled in `phase`, and closed."""
    conductor = world.conductor()
    running = asyncio.create_task(conductor.run())
    act_in(conductor, phase, conductor.pause_asked.set if ended == "paused" else running.cancel)
    with pytest.raises(JobPaused if ended == "paused" else asyncio.CancelledError):
        await asyncio.wait_for(running, 20)
    await conductor.close(ended)
    assert world.events("job_finished")[-1]["state"] == ended


@pytest.mark.parametrize("ended", ["paused", "cancelled"])
@pytest.mark.parametrize("phase", ["restore", "warm-up", "preflight"])
async def test_a_job_is_left_before_its_first_group_and_resumed(
    redis: Redis, tmp_path: Path, phase: str, ended: EndState
) -> None:
    """Nothing is sampled before; a paused job goes on to the same supervised steps and the end."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "say 1", "response": "1"}\n')
    warm_up = {"path": str(pairs), "steps": 2, "pairs_per_step": 1}
    async with running_world(
        redis, tmp_path / "run", job=make_job(steps=4, warm_up=warm_up)
    ) as world:
        await left_in(world, phase, ended)
        assert (await world.announced()).state == "finished"
        assert await redis.xlen(topology.prompts(JOB_ID)) == 0
        made = {"restore": 0, "warm-up": 1, "preflight": 2}[phase]
        assert len(world.history) == (made if ended == "paused" or phase == "preflight" else 0)
        if ended == "paused":
            await run_to_end(world)
            steps = world.events("step")
            assert [step["step"] for step in steps] == [1, 2, 3, 4]
            assert [step for step, _ in world.history] == [1, 2, 3, 4]  # each once
            await check_streams_empty(redis)


@pytest.mark.parametrize("ended", ["paused", "cancelled"])
@pytest.mark.parametrize("phase", ["collecting", "committing", "evaluating"])
async def test_a_job_is_left_while_it_waits_for_others_and_resumed(
    redis: Redis, tmp_path: Path, phase: str, ended: EndState
) -> None:
    """For a step's groups, for servers to take a version, for evaluations after the last step."""
    section = {
        "suite": "heldout", "every_steps": 2, "data": {"path": "/nowhere"},
        "max_response_tokens": 8,
    }  # fmt: skip
    async with running_world(redis, tmp_path / "run", job=make_job(eval=section)) as world:
        await left_in(world, phase, ended)
        books = Books(world.run_dir / BOOKS_FILE)
        assert books.last_step() == (4 if phase == "evaluating" else 0)
        assert books.counts()["trained"] == 3 * books.last_step()
        books.close()
        if ended == "paused":
            await run_to_end(world)
            assert [step for step, _ in world.history] == [1, 2, 3, 4]  # each once
            assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4]
            assert {version for _, version, _ in world.evaluated} == {0, 2, 4}
            check_books(world).close()
            await check_streams_empty(redis)
