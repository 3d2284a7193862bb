"""When a profile begins and ends, by a job on fakes; what it shows is tested on real services."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer.announcements import announce_active
from services.trainer.conductor import Conductor
from services.trainer.profile.session import ProfileRefused
from shared import topology
from shared.current_job import CurrentJob
from shared.messages import JobAnnounced, ProfileAnnounced, SpanBatch
from shared.profiled import Profiled
from shared.spans import recorder
from shared.streams import read_from
from shared.tasks import end
from tests.integration.conductor_world import FakeRanks, World, make_job, running_world


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.trainer.profile.session.COLLECT_S", 0.3)
    yield
    assert not recorder().is_on, "it records on"


async def run(world: World, conductor: Conductor, ended: Any = "finished") -> list[JobAnnounced]:
    """To the end; what was announced at each step."""
    announced: list[JobAnnounced] = []
    announce = conductor.parts.profiler.at_step

    async def at_step(*args: Any) -> None:
        await announce(*args)
        announced.append(await world.announced())

    conductor.parts.profiler.at_step = at_step  # type: ignore[method-assign]
    await asyncio.wait_for(conductor.run(), 40)
    await conductor.close(ended)
    return announced


async def test_a_profile_has_one_step_of_lead_in_and_then_its_steps(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6)) as world:
        conductor = world.conductor()
        profile = conductor.parts.profiler.ask(2)
        announced = await run(world, conductor)
    assert [one.profile is not None for one in announced] == [True] * 3 + [False] * 3
    assert (profile.state, profile.steps_seen) == ("done", 2)
    assert profile.result["missing"] == ["rollout-0"]  # the fake one tells nothing
    folder = tmp_path / "run" / "profiles" / profile.profile_id
    assert json.loads((folder / "waits.json").read_text()) == profile.result
    spans = [
        one
        for one in json.loads((folder / "trace.json").read_text())["traceEvents"]
        if one["ph"] == "X"
    ]
    (window,) = (one for one in spans if one["cat"] == "window")
    spans = [one for one in spans if one["cat"] == "step" and one["ts"] >= window["ts"]]
    assert [one["name"] for one in spans].count("wait") == 2
    assert [one["name"] for one in spans].count("train") == 2


async def test_the_jobs_end_ends_it_with_what_was_seen(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        conductor = world.conductor()
        profile = conductor.parts.profiler.ask(50)
        with pytest.raises(ProfileRefused, match=profile.profile_id):
            conductor.parts.profiler.ask(1)
        await run(world, conductor)
        assert (await world.announced()).profile is None
    assert (profile.state, profile.steps_seen) == ("done", 3)


async def test_ranks_that_are_lost_meanwhile_cost_the_job_nothing(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        world.rank_faults += ["spans", "train_step:3"]
        conductor = world.conductor()
        profile = conductor.parts.profiler.ask(2)
        await run(world, conductor)
        assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4]
    assert profile.state == "done"


async def test_ranks_are_asked_at_every_step_and_told_to_stop(redis: Redis, tmp_path: Path) -> None:
    """So those that are started anew meanwhile record, too."""
    told = {"host": "h", "pid": 1, "boot_id": "b", "dropped": 0}
    clock = {"clock_ahead_ns": 0, "clock_uncertainty_ns": 0}
    asked: list[int] = []

    async def spans(ranks: FakeRanks, max_spans: int) -> list[dict[str, Any]]:
        asked.append(max_spans)
        return [{**told, **clock, "spans": [["op", "operations", len(asked), len(asked) + 1, {}]]}]

    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeRanks, "spans", spans)
            conductor = world.conductor()
            profile = conductor.parts.profiler.ask(2)
            await run(world, conductor)
    assert (asked[0] > 0, asked[-1]) == (True, 0)
    assert asked.count(0) == 1
    trace = tmp_path / "run" / "profiles" / profile.profile_id / "trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([one for one in events if one["name"] == "op"]) == len(asked)


async def test_a_job_that_stops_first_leaves_a_failed_one(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        conductor = world.conductor()
        profile = conductor.parts.profiler.ask(1)
        await conductor.close("cancelled")
    assert (profile.state, profile.error) == ("failed", "the job ended first")


async def test_a_service_sends_its_own_and_its_childs_spans_and_stops(redis: Redis) -> None:
    """The child's come first, so that whoever has the last batch of a replica has all."""
    asked: list[int] = []

    async def child(max_spans: int) -> dict[str, Any]:
        asked.append(max_spans)
        return {"spans": [["step", "steps", 1, 2, {}]], "dropped": 0, "pid": 7}

    job = {"job_id": "j", "job": make_job(), "trainer_url": "http://t"}
    profile = ProfileAnnounced(job_id="j", profile_id="p", max_spans=100)
    current, stop = CurrentJob(redis), asyncio.Event()
    service = Profiled(redis, current, service="rollout", replica="r", child=child)
    running = asyncio.create_task(service.run(stop))
    try:
        await announce_active(redis, **job, profile=profile)
        await current.refresh()
        async with asyncio.timeout(60):
            while not recorder().is_on:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        recorder().note("group", "groups", 1, 2, group="g")
        await announce_active(redis, **job)
        await current.refresh()
        batches: list[SpanBatch] = []
        async with asyncio.timeout(60):
            while not (batches and batches[-1].is_last):
                found = await read_from(redis, topology.spans("j"), b"0", 0.1)
                batches = [SpanBatch.unpack(body) for _, body in found]
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=60)
        await end(running)
    assert asked[0] == 100
    assert asked[-1] == 0
    assert {(one.process, one.pid == 7) for one in batches} == {("r engine", True), ("r", False)}
    own = [span for one in batches if one.process == "r" for span in one.spans]
    assert [span[:2] for span in own] == [("group", "groups")]
    assert all(one.clock_uncertainty_ns < 10**9 for one in batches)
    assert not recorder().is_on
