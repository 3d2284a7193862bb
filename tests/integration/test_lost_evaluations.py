"""Every evaluation that is due comes to its end, whatever is lost on the way: the server held for
it, the process that asked, the time it had, the broker's last writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from services.trainer import evals
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.conductor import Conductor
from services.trainer.entries import EvalRecord
from shared import topology
from shared.job import Job
from shared.redis import create_redis
from shared.tasks import end
from shared.telemetry import now_s
from tests.integration.conductor_world import JOB_ID, World, make_job, run_to_end, running_world
from tests.integration.own_broker import running_broker

STREAMS = (topology.prompts, topology.rollouts, topology.evals)


def evaluated_job(*, deadline_s: float = 60.0, every_steps: int = 2, **sections: Any) -> Job:
    section = {
        "suite": "s",
        "data": {"path": "/nowhere"},
        "every_steps": every_steps,
        "max_response_tokens": 8,
        "deadline_s": deadline_s,
    }
    return make_job(eval=section | sections.pop("eval", {}), **sections)


async def until(condition: Callable[[], Any], what: str, *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if await found if isinstance(found, Coroutine) else found:
                return
            await asyncio.sleep(0.02)
    raise AssertionError(what)


@contextlib.asynccontextmanager
async def conducting(world: World) -> AsyncIterator[tuple[Conductor, "asyncio.Task[None]"]]:
    """A conductor that the block may leave halfway, as a process that stops does."""
    conductor = world.conductor()
    running = asyncio.create_task(conductor.run())
    try:
        yield conductor, running
    finally:
        await end(running)
        await conductor.close("finished" if not running.cancelled() else None)


async def holds(redis: Redis) -> dict[str, int]:
    found = await cast(Any, redis.hgetall(topology.holds(JOB_ID)))
    return {name.decode(): int(version) for name, version in found.items()}


async def until_held(redis: Redis, wanted: dict[str, int]) -> None:
    async def are_held() -> bool:
        return await holds(redis) == wanted

    await until(are_held, f"{wanted} to be held")


def evals_of(world: World) -> list[EvalRecord]:
    books = Books(world.run_dir / BOOKS_FILE)
    try:
        return books.evals()
    finally:
        books.close()


def check_all_finished(world: World, versions: list[int]) -> None:
    """The books close each, and the summary has its result."""
    assert [(one.policy_version, one.state) for one in evals_of(world)] == [
        (version, "finished") for version in versions
    ]
    told = {event["eval_id"] for event in world.events("eval_finished")}
    assert told == {f"{JOB_ID}.e{version:08d}" for version in versions}
    assert world.events("eval_failed") == []


async def test_another_server_is_held_once_the_one_that_was_is_gone(
    redis: Redis, tmp_path: Path
) -> None:
    """Scaled away in the middle of an evaluation: what is left goes back to its version."""
    async with running_world(redis, tmp_path / "run", job=evaluated_job(every_steps=4)) as world:
        await world.add_server("rollout-1", samples=False)
        world.answer_evals = False
        world.gates[3] = asyncio.Event()
        async with conducting(world) as (_, running):
            await world.until_served(2)
            assert await holds(redis) == {"rollout-1": 0}
            await world.servers.pop("rollout-1").kill()
            left = world.servers["rollout-0"]
            await until(lambda: left.version == 0, "the server that is left to go back")
            await until_held(redis, {"rollout-0": 0})
            world.gates[3].set()
            world.answer_evals = True
            await world.tell("eval_finished", eval_id=f"{JOB_ID}.e00000000")
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 4])
        [moved] = world.events("eval_moved")
        assert (moved["before"], moved["replica"]) == ("rollout-1", "rollout-0")
        assert await holds(redis) == {}


async def test_a_held_server_that_comes_back_in_time_is_kept(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=evaluated_job()) as world:
        await world.add_server("rollout-1", samples=False)
        world.answer_evals = False
        world.gates[2] = asyncio.Event()
        async with conducting(world) as (_, running):
            await world.until_served(1)
            await world.servers.pop("rollout-1").kill()
            await asyncio.sleep(0.5)
            back = await world.add_server("rollout-1")
            await until(lambda: back.version == 0, "its version again")
            await asyncio.sleep(1.0)
            assert await holds(redis) == {"rollout-1": 0}
            world.gates[2].set()
            world.answer_evals = True
            await world.tell("eval_finished", eval_id=f"{JOB_ID}.e00000000")
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 2, 4])
        assert world.events("eval_moved") == []


async def test_all_that_wait_for_a_dedicated_server_move_together(
    redis: Redis, tmp_path: Path
) -> None:
    job = evaluated_job(every_steps=1, eval={"server": "dedicated"})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        await world.add_server("rollout-2", samples=False)
        world.answer_evals = False
        async with conducting(world) as (_, running):
            await world.until_served(3)
            assert await holds(redis) == {"rollout-2": 0}
            await world.servers.pop("rollout-2").kill()
            await until_held(redis, {"rollout-1": 0})
            world.answer_evals = True
            for version in range(5):
                await world.tell("eval_finished", eval_id=f"{JOB_ID}.e{version:08d}")
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 1, 2, 3, 4])


async def test_one_that_lost_its_server_comes_before_one_that_took_the_last(
    redis: Redis, tmp_path: Path
) -> None:
    """An evaluator waits for the first: the second has its turn once that has ended."""
    job = evaluated_job(every_steps=1)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        await world.add_server("rollout-1", samples=False)
        world.answer_evals = False
        async with conducting(world) as (_, running):
            await until_held(redis, {"rollout-1": 0, "rollout-0": 1})
            await world.servers.pop("rollout-1").kill()
            left = world.servers["rollout-0"]
            await until(lambda: left.version == 0, "the server that is left to go back")
            await until_held(redis, {"rollout-0": 0})
            world.answer_evals = True
            await world.tell("eval_finished", eval_id=f"{JOB_ID}.e00000000")
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 1, 2, 3, 4])


async def test_an_evaluation_that_has_no_server_yet_outlives_the_process(
    redis: Redis, tmp_path: Path
) -> None:
    """Version 1 is nowhere served when step 2 is in the books and the process ends."""
    job = evaluated_job(every_steps=1, algorithm={"max_lag": 1})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.gates[1] = asyncio.Event()
        async with conducting(world) as (conductor, _):
            kept = conductor.parts.collector.held_ids
            await until(lambda: len(kept()) >= 6, "the groups of two steps")
            world.commit_s = 60.0
            world.gates[1].set()
            await until(lambda: [made for made, _ in world.history] == [1, 2], "step 2")
        assert world.servers["rollout-0"].version == 0
        world.commit_s = 0.0
        await run_to_end(world)
        check_all_finished(world, [0, 1, 2, 3, 4])


async def test_an_evaluation_whose_time_passed_in_a_pause_is_asked_for_again(
    redis: Redis, tmp_path: Path
) -> None:
    job = evaluated_job(deadline_s=3.0)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.answer_evals = False
        async with conducting(world):
            await until(lambda: world.evaluated, "the request")
        await asyncio.sleep(3.0)
        world.answer_evals = True
        await run_to_end(world)
        check_all_finished(world, [0, 2, 4])


async def test_a_broker_that_lost_the_request_is_told_again(tmp_path: Path, free_port: int) -> None:
    """It comes back as it was before it was asked, and the evaluator that had read it is gone."""
    async with running_broker(tmp_path / "broker", free_port) as own:
        redis = create_redis(own.url, process="test", patience_s=20)
        async with running_world(redis, tmp_path / "run", job=evaluated_job()) as world:
            streams = [stream(JOB_ID) for stream in STREAMS]

            async def have_consumers() -> bool:
                return await redis.exists(*streams) == len(streams)

            await until(have_consumers, "the consumers' groups")
            own.remember()
            world.answer_evals = False
            async with conducting(world) as (_, running):
                await until(lambda: world.evaluated, "the request")
                await own.forget()
                world.answer_evals = True
                await asyncio.wait_for(running, 30)
            check_all_finished(world, [0, 2, 4])
        await redis.aclose()


async def test_a_request_that_is_done_without_a_result_is_asked_again(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lost the result, and the acknowledgement came when it was back."""
    monkeypatch.setattr(evals, "LOOK_S", 0.5)
    async with running_world(redis, tmp_path / "run", job=evaluated_job()) as world:
        world.answer_evals = False
        async with conducting(world) as (_, running):
            await until(lambda: world.evaluated, "the request")
            world.answer_evals = True
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 2, 4])


async def test_a_request_that_is_buried_fails_with_the_reason(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evals, "LOOK_S", 0.5)
    job = evaluated_job(every_steps=4, deadline_s=600.0)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.refuse_evals = "its worker died 5 times"
        await run_to_end(world)
        failed = world.events("eval_failed")
        assert [event["policy_version"] for event in failed] == [0, 4]
        assert all("its worker died 5 times" in event["error"] for event in failed)


async def test_holds_of_before_do_not_overtake_newer_ones(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the broker is told again while an evaluation begins, and a connection was lost."""
    async with running_world(redis, tmp_path / "run", job=evaluated_job(), servers=0) as world:
        conductor = world.conductor()
        holding, gate = conductor.parts.evals, asyncio.Event()
        late = redis.pipeline(transaction=True)
        execute = late.execute

        async def execute_late() -> Any:
            await gate.wait()
            return await execute()

        monkeypatch.setattr(late, "execute", execute_late)
        pipelines = [late]
        monkeypatch.setattr(
            redis,
            "pipeline",
            lambda **how: pipelines.pop() if pipelines else Redis.pipeline(redis, **how),
        )
        first = asyncio.create_task(holding.announce())
        await until(lambda: not pipelines, "the first announcement")
        holding._open["e"] = EvalRecord("e", 3, 3, "rollout-0", 1e12, "open")
        second = asyncio.create_task(holding.announce())
        await asyncio.sleep(0.2)
        gate.set()
        await asyncio.gather(first, second)
        assert await holds(redis) == {"rollout-0": 3}
        conductor.parts.close()


async def test_a_dedicated_server_is_asked_for_one_evaluation_at_a_time(
    redis: Redis, tmp_path: Path
) -> None:
    """An evaluator that had the next request first, say after a hiccup of the broker, would wait
    for a version that its server does not go to before the first one is over."""
    job = evaluated_job(every_steps=1, eval={"server": "dedicated"})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.answer_evals = False
        async with conducting(world) as (_, running):
            await world.until_served(3)
            world.answer_evals = True
            await world.tell("eval_finished", eval_id=f"{JOB_ID}.e00000000")
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 1, 2, 3, 4])
        check_all_were_held(world)


async def test_a_server_stays_at_the_version_it_was_asked_for_while_another_is_asked_again(
    redis: Redis, tmp_path: Path
) -> None:
    """In a pause the time of the first passed; that of the second, which waited for it, did not."""
    job = evaluated_job(every_steps=1, deadline_s=8.0, eval={"server": "dedicated"})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.answer_evals = False
        async with conducting(world):
            await world.until_served(2)
        first, second, *_ = evals_of(world)
        await asyncio.sleep(max(0.0, first.deadline_s - now_s()) + 0.5)
        world.evaluated.clear()
        async with conducting(world) as (_, running):
            await until(lambda: evals_of(world)[0] != first, "a server for the first")
            assert now_s() < second.deadline_s
            await asyncio.sleep(0.2)
            assert await holds(redis) == {"rollout-1": 1}
            assert {version for _, version, _ in world.evaluated} == {1}
            world.answer_evals = True
            await world.tell("eval_finished", eval_id=second.eval_id)
            await asyncio.wait_for(running, 30)
        check_all_finished(world, [0, 1, 2, 3, 4])
        check_all_were_held(world)


async def test_a_dedicated_server_that_is_left_alone_trains_between_evaluations(
    redis: Redis, tmp_path: Path
) -> None:
    """Also where the next process finds it alone, and in the books that it was held last."""
    job = evaluated_job(every_steps=4, eval={"server": "dedicated"})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.gates[2] = asyncio.Event()
        async with conducting(world):
            await world.until_served(1)
            await until(lambda: evals_of(world)[0].state == "finished", "the first evaluation")
            assert await holds(redis) == {"rollout-1": 0}
            await world.servers.pop("rollout-0").kill()
            world.gates[2].set()
            await world.until_served(2, by="rollout-1")
            assert await holds(redis) == {}
        await run_to_end(world)
        check_all_finished(world, [0, 4])


def check_all_were_held(world: World) -> None:
    """Whoever was asked found a server held at the version."""
    for _, version, held in world.evaluated:
        assert version in held.values()
