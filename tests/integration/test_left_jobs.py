"""Jobs that are paused or cancelled in every phase: whole books, and a resume that goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.conductor import Conductor
from services.trainer.disk import Unwritable
from services.trainer.pausing import JobPaused
from services.trainer.ranks import RankSet
from services.trainer.steps import EndState
from shared import topology
from shared.tasks import end
from tests.integration.conductor_world import (
    JOB_ID,
    Crash,
    World,
    make_job,
    run_to_end,
    running_world,
)
from tests.integration.test_conductor import POINTS, check_books, check_streams_empty


@pytest.mark.parametrize("point", POINTS)
async def test_a_pause_in_every_phase_loses_nothing(
    redis: Redis, tmp_path: Path, point: str
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        conductor = world.conductor()
        conductor._on_point = lambda now: now == point and conductor.pause_asked.set()
        with pytest.raises(JobPaused, match="paused on request"):
            await asyncio.wait_for(conductor.run(), 60)
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
        "ranks' start": (parts.keeper, "_start_ranks"),
        "warm-up": (parts.keeper, "train"),
        "first export": (parts.keeper, "export"),
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
            if phase != "warm-up":  # a job that is left waits for nothing but a step under way
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
@pytest.mark.parametrize("phase", ["ranks' start", "warm-up", "first export", "preflight"])
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
        made = {"ranks' start": 0, "warm-up": 1}.get(phase, 2)
        assert len(world.history) == (made if ended == "paused" or made == 2 else 0)
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


class Hanging:
    """Has ranks of a conductor hang where they come up, from their `first` start on."""

    def __init__(self, conductor: Conductor, phase: str, *, first: int = 1) -> None:
        self.reached = asyncio.Event()
        self.num_begun, self.num_stopped = 0, 0
        self._phase, self._first = phase, first
        self._start = conductor.parts.keeper._start_ranks
        conductor.parts.keeper._start_ranks = self.start

    async def start(self) -> RankSet:
        self.num_begun += 1
        if self._phase == "start" and self.num_begun >= self._first:
            await self.hang()
        ranks = await self._start()
        if self._phase != "start":
            setattr(ranks, {"load": "load", "replay": "train_step"}[self._phase], self.hang)
        ranks.stop = self.stop  # type: ignore[method-assign]
        return ranks

    async def hang(self, *_: Any, **__: Any) -> Any:
        self.reached.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.num_stopped += self._phase == "start"  # there is nothing else to stop yet
            raise

    async def stop(self) -> None:
        """Takes a moment, and must not be cut short."""
        await asyncio.sleep(0.3)
        self.num_stopped += 1


@pytest.mark.parametrize("phase", ["start", "load", "replay"])
async def test_a_pause_is_obeyed_while_ranks_come_up(
    redis: Redis, tmp_path: Path, phase: str
) -> None:
    """They have a checkpoint of step 2 to load and step 3 to replay, and take for ever."""
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        dying = world.conductor()

        def die(now: str) -> None:
            if now == "committed" and dying.parts.progress.step == 3:
                raise Crash(now)

        dying._on_point = die
        with pytest.raises(Crash):
            await asyncio.wait_for(dying.run(), 60)
        await dying.close(None)
        assert [step for step, _ in world.history] == [1, 2]
        conductor = world.conductor()
        hanging = Hanging(conductor, phase)
        await paused_once_reached(conductor, hanging)
        assert (hanging.num_begun, hanging.num_stopped) == (1, 1)
        await run_to_end(world)
        assert [step for step, _ in world.history] == [1, 2, 3, 4]
        check_books(world).close()
        await check_streams_empty(redis)


async def test_a_pause_is_obeyed_while_new_ranks_come_up_within_a_step(
    redis: Redis, tmp_path: Path
) -> None:
    """The step's batch is durable: it is trained when the job goes on."""
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        world.rank_faults += ["train_step:3"]
        conductor = world.conductor()
        hanging = Hanging(conductor, "start", first=2)
        await paused_once_reached(conductor, hanging)
        assert (hanging.num_begun, hanging.num_stopped) == (2, 2)
        await run_to_end(world)
        assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4]
        check_books(world).close()
        await check_streams_empty(redis)


async def paused_once_reached(conductor: Conductor, hanging: Hanging) -> None:
    running = asyncio.create_task(conductor.run())
    await asyncio.wait_for(hanging.reached.wait(), 20)
    conductor.pause_asked.set()
    with pytest.raises(JobPaused, match="paused on request"):
        await asyncio.wait_for(running, 60)
    await conductor.close("paused")


@pytest.mark.parametrize(
    ("point", "file"),
    [("packed", "books"), ("trained", "books"), ("told", "books"), ("committed", "recording")],
)
async def test_a_full_disk_loses_nothing(
    redis: Redis, tmp_path: Path, point: str, file: str
) -> None:
    """SQLite gets not a page more from there on; with space again the job goes on to its end."""
    async with running_world(redis, tmp_path / "run", job=make_job(record=True)) as world:
        conductor = world.conductor()
        full = getattr(conductor.parts, file)

        def fill(now: str) -> None:
            if now == point:
                (pages,) = full._db.execute("PRAGMA page_count").fetchone()
                full._db.execute(f"PRAGMA max_page_count = {pages}")

        conductor._on_point = fill
        message = rf"{file}\.sqlite cannot be written: database or disk is full \([\d,]+ bytes are"
        with pytest.raises(Unwritable, match=message):
            await asyncio.wait_for(conductor.run(), 60)
        await conductor.close("paused", saves=False)
        await run_to_end(world)
        assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4]
        check_books(world).close()
        await check_streams_empty(redis)
