"""A whole job on fakes at the heavy seams and a real broker: the books must balance."""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.disk import Unwritable
from services.trainer.entries import Group, Step
from services.trainer.pausing import JobPaused
from services.trainer.preflight.findings import PreflightRefused
from services.trainer.prompts import NoPromptFits
from services.trainer.rollback import NOTE
from services.trainer.servers import MAX_REFUSALS
from services.trainer.versions import VersionStore
from shared import topology
from shared.dead_letters import requeue_dead
from shared.errors import Rejected, WeightsCorrupt
from shared.messages import Outcome, PromptGroup, RolloutGroup, Score
from shared.streams import Consumer, publish
from shared.tasks import end
from shared.weights.kept import CHANGES_ONLY
from shared.weights.manifest import shard_file
from tests.integration.conductor_world import (
    JOB_ID,
    PUBLISHED,
    Crash,
    World,
    alternating,
    graded,
    make_job,
    run_to_end,
    running_world,
)

OTHER = "f" * 32  # an effective checksum that nothing published has
POINTS = ["packed", "committed", "trained", "acked", "exported", "published", "saved", "told"]


def check_books(world: World) -> Books:
    """Every drawn group is settled, once; the ranks trained what the books say."""
    books = Books(world.run_dir / BOOKS_FILE)
    counts = books.counts()
    steps = world.job.steps
    assert counts["open"] == 0
    assert counts["trained"] == steps * world.job.sampling.groups_per_step
    assert counts["trained"] + counts["dropped"] + counts["skipped"] == books.next_draw()
    assert [step.step for step in books.steps()] == list(range(1, steps + 1))
    by_step = dict(world.history)
    for step in range(1, steps + 1):
        assert by_step[step] == [group.group_id for group in books.groups_of_step(step)]
    trained = Counter(name for names in by_step.values() for name in names)
    assert set(trained.values()) == {1}
    return books


def steps_of(world: World, step: int) -> list[Step]:
    """What stands in the books of a run that nobody conducts."""
    books = Books(world.run_dir / BOOKS_FILE)
    try:
        return [made for made in books.steps(step) if made.step == step]
    finally:
        books.close()


async def check_streams_empty(redis: Redis) -> None:
    for stream in (topology.prompts(JOB_ID), topology.rollouts(JOB_ID), topology.groups(JOB_ID)):
        assert await redis.xlen(stream) == 0, stream
        assert await redis.xlen(topology.dead(stream)) == 0, stream


async def test_job_trains_every_group_once(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=2) as world:
        assert await run_to_end(world) == 1
        check_books(world)
        steps = world.events("step")
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert [step["policy_version"] for step in steps] == [1, 2, 3, 4]
        assert all(step["lag_max"] == 0 for step in steps)
        assert {"wait", "pack", "export", "publish", "checkpoint"} <= set(steps[0]["seconds"])
        dropped = world.events("group_dropped")
        assert {event["reason"] for event in dropped} == {"no_variance_all_wrong"}
        for server in world.servers.values():
            assert server.version == 4
            assert server.weights[4] == world.ranks.weights
        assert [event["policy_version"] for event in world.events("weights_published")] == [
            0,
            1,
            2,
            3,
            4,
        ]
        assert (await world.announced()).state == "finished"
        await check_streams_empty(redis)


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_conductor_that_dies_at_every_point_trains_every_group_once(
    redis: Redis, tmp_path: Path, max_lag: int
) -> None:
    job = make_job(algorithm={"max_lag": max_lag}, steps=10)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        assert await run_to_end(world, crash_at=list(POINTS)) == len(POINTS) + 1
        check_books(world).close()
        steps = world.events("step")
        assert [step["step"] for step in steps] == list(range(1, 11))
        assert all(step["lag_max"] <= max_lag for step in steps)
        await check_streams_empty(redis)


async def test_same_groups_give_the_same_weights_whoever_dies(redis: Redis, tmp_path: Path) -> None:
    """Ranks, conductor and servers die in one run and not in the other."""
    weights = []
    for name in ("calm", "stormy"):
        await redis.flushall()
        async with running_world(redis, tmp_path / name, job=make_job(steps=5)) as world:
            crash_at: list[str] = []
            if name == "stormy":
                world.rank_faults += ["train_step:2", "export:3", "save:4", "train_step:5"]
                crash_at = ["committed", "acked", "exported"]
            await run_to_end(world, crash_at=crash_at)
            check_books(world).close()
            assert not world.rank_faults
            weights.append(world.ranks.weights)
            if name == "stormy":
                assert len(world.events("rank_restarted")) == 4
    assert weights[0] == weights[1]


async def test_replay_that_makes_other_weights_is_another_version(
    redis: Redis, tmp_path: Path
) -> None:
    job = make_job(checkpoint={"every_steps": 50})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        crashing = world.conductor(crash_at=["acked", "saved"])
        with pytest.raises(Crash):
            await crashing.run()
        await crashing.close(None)
        crashing = world.conductor(crash_at=["saved"])
        with pytest.raises(Crash):
            await crashing.run()
        await crashing.close(None)
        served = dict(world.servers["rollout-0"].weights)
        assert sorted(served) == [0, 1, 2]
        world.salt = b"another machine"
        await run_to_end(world)
        server = world.servers["rollout-0"]
        assert {version: server.weights[version] for version in served} == served
        assert sorted(server.weights) == [0, 1, 2, 3, 4, 5]  # 3 is step 2 once more
        assert [step["policy_version"] for step in world.events("step")] == [1, 2, 4, 5]
        check_books(world).close()


async def test_job_beyond_its_preflight_samples_nothing(redis: Redis, tmp_path: Path) -> None:
    """The servers of this world cannot complete a prompt on request."""
    job = make_job(preflight={"enabled": True}, model={"rollout_checkpoint": "assets/tiny-dsv4"})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        conductor = world.conductor()
        with pytest.raises(PreflightRefused, match=r"rollout-0 cannot be compared: POST .*404"):
            await asyncio.wait_for(conductor.run(), 40)
        await conductor.close("failed")
        (event,) = world.events("preflight_finished")
        assert not event["passed"]
        assert event["memory"]["needed"] < event["memory"]["available"]
        assert await redis.xlen(topology.prompts(JOB_ID)) == 0
        assert not world.history


async def test_duplicates_are_refused_and_counted(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        seen = 0

        async def grade_twice(stop: asyncio.Event) -> None:
            async def handle(body: bytes) -> None:
                nonlocal seen
                scored = graded(RolloutGroup.unpack(body), world.grade).pack()
                seen += 1
                await publish(redis, topology.groups(JOB_ID), scored)
                await publish(redis, topology.groups(JOB_ID), scored)

            name = topology.rollouts(JOB_ID)
            consumer = Consumer(redis, name, topology.GRADERS, "twice", block_s=0.1)
            await consumer.run(handle, stop=stop)

        stop = asyncio.Event()
        twice = asyncio.create_task(grade_twice(stop))
        await run_to_end(world)
        stop.set()
        await twice
        check_books(world).close()
        refused = world.events("duplicate_refused")
        assert 0 < len(refused) <= seen
        assert {event["settled_as"] for event in refused} <= {"trained", "dropped", "open"}


async def test_broker_that_forgets_everything_is_told_again(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6)) as world:
        world.sampling_s = 0.05
        running = asyncio.create_task(run_to_end(world))
        for version in (2, 4):
            await world.until_served(version)
            await redis.flushall()
        await running
        check_books(world).close()
        assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4, 5, 6]


async def test_late_and_restarted_servers_get_the_current_version(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=8)) as world:
        world.sampling_s = 0.05
        running = asyncio.create_task(run_to_end(world))
        await world.until_served(1)
        late = await world.add_server("rollout-1")
        await until(lambda: late.version is not None)
        assert min(late.weights) >= 1
        await world.servers["rollout-0"].kill()
        again = await world.add_server("rollout-0", pid=1)
        await until(lambda: again.version is not None)
        await running
        assert again.version == late.version == 8
        assert again.weights[8] == late.weights[8] == world.ranks.weights
        check_books(world).close()


async def test_server_that_fails_or_hangs_costs_the_others_nothing(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=5)) as world:
        world.sampling_s = 0.1
        failing = await world.add_server("rollout-1", fail_commits=1)
        hanging = await world.add_server("rollout-2", frozen=True, samples=False)
        await run_to_end(world)
        check_books(world).close()
        failed = world.events("update_failed")
        assert {event["server"] for event in failed} == {"rollout-1", "rollout-2"}
        assert sum(event["server"] == "rollout-1" for event in failed) == 1
        assert any("the probe failed" in event["error"] for event in failed)
        backoffs = [event["retry_in_s"] for event in failed if event["server"] == "rollout-2"]
        assert backoffs == sorted(backoffs)
        assert failing.version is not None
        assert hanging.version is None


async def test_first_commit_of_a_version_goes_alone(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=2), servers=3) as world:
        world.commit_s = 0.05
        for server in world.servers.values():
            server.fail_commits = 1  # nobody accepts version 0 at first
        await run_to_end(world)
        assert len(world.events("update_failed")) == 3
        assert world.most_first_commits == 1
        assert {version for _, version in world.commits} == {0, 1, 2}
        check_books(world).close()


async def test_replicas_are_compared_although_the_first_answer_is_lost(
    redis: Redis, tmp_path: Path
) -> None:
    """Two servers that compute with different values: one of them never serves any."""
    async with running_world(redis, tmp_path / "run", job=make_job(steps=2), servers=2) as world:
        world.commit_s = 0.05
        for server in world.servers.values():
            server.lose_answers = 1
        world.servers["rollout-1"].checksum = OTHER
        await run_to_end(world)
        check_books(world).close()
        failed = [one for one in world.events("update_failed") if one["server"] == "rollout-1"]
        assert any(OTHER in one["error"] and PUBLISHED in one["error"] for one in failed)
        store = VersionStore(tmp_path / "run")
        assert [store.effective(version) for version in range(3)] == [PUBLISHED] * 3


@pytest.mark.parametrize("is_honest", [False, True])
async def test_a_first_server_that_was_lost_is_compared_when_it_is_back(
    redis: Redis, tmp_path: Path, is_honest: bool
) -> None:
    """It served before anybody knew what; another goes on meanwhile, and says its value first. If
    that one lies, the first need not begin anew."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        traits = {"lose_answers": 1, "freezes_then": True, "samples": False}
        sums = (PUBLISHED, OTHER) if is_honest else (OTHER, PUBLISHED)
        lost = await world.add_server("rollout-0", checksum=sums[0], **traits)
        conductor = world.conductor()
        running, publisher = asyncio.create_task(conductor.run()), conductor.parts.publisher
        await until(lambda: lost.version == 0)
        assert publisher.serving(0) == []
        other = await world.add_server("rollout-1", samples=False, lies=is_honest, checksum=sums[1])
        await until(lambda: other.version == 0)
        await until(lambda: publisher.serving(0) == ["rollout-1"])
        lost.frozen = False
        if is_honest:
            await until(lambda: publisher.serving(0) == ["rollout-0"])
        else:
            await until(lambda: lost.restarts == 1)
            assert publisher.serving(0) == ["rollout-1"]
        assert lost.restarts == (not is_honest)
        await end(running)
        await conductor.close("cancelled")
        assert world.digested == [0]
        told = [one["error"] for one in world.events("update_failed")]
        assert any(f"is {OTHER}, what was published has {PUBLISHED}" in error for error in told)


async def test_a_first_server_that_departs_from_what_was_published_is_not_asked_alone(
    redis: Redis, tmp_path: Path
) -> None:
    """As one that failed the probe would be: of this one everybody knows that it is wrong."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running, store = asyncio.create_task(conductor.run()), conductor.parts.store
        await until(lambda: conductor.parts.publisher.current == 0)
        store.settle(0, PUBLISHED)  # nobody is left of those who disagreed
        await world.add_server("rollout-0", lies=True, checksum=OTHER, samples=False)
        await until(lambda: len(world.events("update_failed")) == 1)
        await world.add_server("rollout-1", samples=False)
        await until(lambda: conductor.parts.publisher.serving(0) == ["rollout-1"])
        assert len(world.events("update_failed")) < MAX_REFUSALS
        await end(running)
        await conductor.close("cancelled")
        assert world.digested == []


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_server_that_lies_is_named_wherever_it_comes(
    redis: Redis, tmp_path: Path, position: int
) -> None:
    """The ranks are asked once, also over a restart of the conductor; a liar that changes its story
    without loading anew is not believed."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        for number in range(3):
            traits = {"lies": True, "checksum": OTHER} if number == position else {}
            one = await world.add_server(f"rollout-{number}", samples=False, **traits)
            await until(lambda one=one: one.version == 0)
        liar = world.servers[f"rollout-{position}"]
        honest = sorted(world.servers.keys() - {liar.name})

        def told() -> list[str]:
            failed = world.events("update_failed")
            assert {one["server"] for one in failed} <= {liar.name}
            return [one["error"] for one in failed]

        await until(lambda: conductor.parts.publisher.serving(0) == honest)
        await until(lambda: len(told()) >= 2)
        liar.checksum = PUBLISHED
        before = len(told())
        await until(lambda: len(told()) > before + 1)
        assert all(f"is {OTHER}, what was published has {PUBLISHED}" in text for text in told())
        assert conductor.parts.publisher.serving(0) == honest
        liar.checksum = OTHER
        await end(running)
        await conductor.close(None)

        again, before = world.conductor(), len(told())
        running = asyncio.create_task(again.run())
        await until(lambda: again.parts.publisher.serving(0) == honest and len(told()) > before)
        await end(running)
        await again.close("cancelled")
        assert world.digested == [0]
        assert all(world.servers[name].restarts == 0 for name in honest)


async def test_ranks_that_cannot_read_what_they_published_settle_nothing(
    redis: Redis, tmp_path: Path
) -> None:
    """The first server's word stands; who disagrees waits, and the reason has both."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        world.rank_faults += ["damaged"]
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        first = await world.add_server("rollout-0", checksum=OTHER, samples=False)
        await until(lambda: first.version == 0)
        await world.add_server("rollout-1", samples=False)
        await until(lambda: len(world.events("update_failed")) == 2)
        assert conductor.parts.publisher.serving(0) == ["rollout-0"]
        await end(running)
        await conductor.close("cancelled")
        assert not world.rank_faults  # they were asked once
        for failed in world.events("update_failed"):
            assert failed["server"] == "rollout-1"
            assert f"expected was {OTHER}" in failed["error"]
            assert "version 0 cannot be digested: WeightsCorrupt: w is not" in failed["error"]


async def test_a_full_disk_under_what_the_ranks_say_pauses_the_job(
    redis: Redis, tmp_path: Path
) -> None:
    """With space again it is asked for, and kept."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running, store = asyncio.create_task(conductor.run()), conductor.parts.store
        first = await world.add_server("rollout-0", checksum=OTHER, samples=False)
        await until(lambda: first.version == 0)
        scratch = store.path(0) / "published.tmp"
        scratch.symlink_to("/dev/full")
        await world.add_server("rollout-1", samples=False)
        with pytest.raises(Unwritable, match=r"published\.txt cannot be written: .* bytes are"):
            await asyncio.wait_for(running, 20)
        await conductor.close("paused", saves=False)
        scratch.unlink()

        again = world.conductor()
        running = asyncio.create_task(again.run())
        await until(lambda: again.parts.publisher.serving(0) == ["rollout-1"])
        assert again.parts.store.settled(0) == PUBLISHED
        await end(running)
        await again.close("cancelled")
        assert world.digested == [0, 0]


async def test_a_job_goes_on_beside_a_server_that_lies_about_every_version(
    redis: Redis, tmp_path: Path
) -> None:
    """It is quarantined for longer each time, whoever believed it at first."""
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6), servers=0) as world:
        world.sampling_s = 0.05
        world.rank_faults += ["checksum"]
        await world.add_server("rollout-0", lies=True, checksum=OTHER)
        running = asyncio.create_task(run_to_end(world))
        await world.until_served(0)
        others = [await world.add_server(f"rollout-{number}") for number in (1, 2)]
        await running
        check_books(world).close()
        assert [one.version for one in others] == [6, 6]
        assert len(world.digested) == len(set(world.digested)) > 0
        failed = world.events("update_failed")
        assert {one["server"] for one in failed} == {"rollout-0"}
        waits = [one["retry_in_s"] for one in failed]
        assert waits == sorted(waits)
        assert waits[-1] > waits[0]


async def test_an_honest_server_that_knows_its_values_late_does_not_begin_anew(
    redis: Redis, tmp_path: Path
) -> None:
    """It serves already what the first one, a liar, made everybody expect otherwise."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        liar = await world.add_server("rollout-0", lies=True, checksum=OTHER, samples=False)
        await until(lambda: liar.version == 0)
        late = await world.add_server("rollout-1", checks=False, samples=False)
        await until(lambda: conductor.parts.publisher.serving(0) == ["rollout-1"])
        assert late.restarts == 0
        assert world.commits == [("rollout-0", 0), ("rollout-1", 0)]
        await end(running)
        await conductor.close("cancelled")


async def test_an_honest_server_whose_commit_was_late_does_not_begin_anew(
    redis: Redis, tmp_path: Path
) -> None:
    """It is asked again while it still activates what a liar meanwhile says otherwise of."""
    job = make_job(update={"deadline_s": 1.0})
    async with running_world(redis, tmp_path / "run", job=job, servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        late = await world.add_server("rollout-0", hangs_in_commit=True, samples=False)
        await until(lambda: world.hanging_commits == 1)
        late.activating, late.hangs_in_commit = 0, False
        liar = await world.add_server("rollout-1", lies=True, checksum=OTHER, samples=False)
        await until(lambda: liar.version == 0)
        seen = late.num_polls
        await until(lambda: late.num_polls > seen)
        late.activating, late.version = None, 0
        await until(lambda: conductor.parts.publisher.serving(0) == ["rollout-0"])
        assert late.restarts == 0
        await end(running)
        await conductor.close("cancelled")


async def test_a_server_that_has_loaded_anew_is_believed_although_its_answer_was_lost(
    redis: Redis, tmp_path: Path
) -> None:
    """It was wrong the first time, and is right now."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        first = await world.add_server("rollout-0", checksum=OTHER, samples=False)
        await until(lambda: first.version == 0)
        await world.add_server("rollout-1", samples=False)
        await until(lambda: len(world.events("update_failed")) == 2)  # it has begun anew
        first.checksum, first.lose_answers = PUBLISHED, 2
        await until(lambda: conductor.parts.publisher.serving(0) == ["rollout-0", "rollout-1"])
        assert first.restarts == 1
        assert first.lose_answers == 0
        await end(running)
        await conductor.close("cancelled")


@pytest.mark.parametrize("answer", [(200, "{}"), (200, "{"), (409, '{"detail": [{"loc": 3}]}')])
async def test_a_server_whose_answers_mean_nothing_holds_up_no_other(
    redis: Redis, tmp_path: Path, answer: tuple[int, str]
) -> None:
    """Not even as the first one: that says nothing of the version."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await until(lambda: conductor.parts.publisher.current == 0)
        await world.add_server("rollout-0", garbles=answer, samples=False)
        await until(lambda: len(world.events("update_failed")) == 1)
        await world.add_server("rollout-1", samples=False)
        await until(lambda: conductor.parts.publisher.serving(0) == ["rollout-1"])
        assert not running.done()
        await end(running)
        await conductor.close("cancelled")


async def test_a_server_has_one_deadline_for_all_of_an_update(redis: Redis, tmp_path: Path) -> None:
    """What it takes to stage is not there for its commit; whoever waits for its turn loses none."""
    job = make_job(update={"deadline_s": 3.0})
    async with running_world(redis, tmp_path / "run", job=job, servers=0) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        traits = {"staging_s": 0.9, "hangs_in_commit": True, "samples": False}
        await world.add_server("rollout-0", **traits)
        await until(lambda: world.hanging_commits == 1)
        world.commit_s = 1.6  # two seconds go by until its turn
        late = await world.add_server("rollout-1", samples=False)
        await until(lambda: late.version == 0)
        await end(running)
        await conductor.close("cancelled")
        failed = world.events("update_failed")
        assert {one["server"] for one in failed} == {"rollout-0"}
        told = r"waited (1\.[89]|2(\.\d)?) s for http://rollout-0 to commit version 0; of its 3 s"
        assert re.search(told, failed[0]["error"]), failed[0]["error"]


async def test_version_that_fails_its_probe_reaches_one_server_and_pauses_the_job(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=3) as world:
        world.commit_s = 0.05  # the others have staged it meanwhile
        for server in world.servers.values():
            server.fail_commits = 100
        conductor = world.conductor()
        with pytest.raises(JobPaused, match=r"version 0 was refused 3 times by rollout-.*probe"):
            await conductor.run()
        await conductor.close("paused")
        assert sorted(server.fail_commits for server in world.servers.values()) == [97, 100, 100]
        assert not world.history


@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_another_server_is_asked_once_the_one_that_refused_is_out(
    redis: Redis, tmp_path: Path, how: str
) -> None:
    """One server alone is broken: taken out, or without an answer, it costs the job nothing."""
    async with running_world(redis, tmp_path / "run", job=make_job(), servers=0) as world:
        broken = await world.add_server("rollout-0", fail_commits=100, samples=False)
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await until(lambda: broken.fail_commits == 99)
        healthy = await world.add_server("rollout-1")
        if how == "gone":
            await broken.kill()
        else:
            broken.frozen = True
        await asyncio.wait_for(running, 40)
        await conductor.close("finished")
        assert (broken.version, healthy.version) == (None, 4)
        check_books(world).close()


async def test_evaluated_versions_are_pinned(redis: Redis, tmp_path: Path) -> None:
    section = {
        "suite": "s",
        "data": {"path": "/nowhere"},
        "every_steps": 2,
        "max_response_tokens": 8,
        "deadline_s": 20.0,
    }
    job = make_job(steps=5, eval=section)
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        crash_at = ["published", "committed"]
        await run_to_end(world, crash_at=crash_at)
        books = check_books(world)
        assert [(one.policy_version, one.state) for one in books.evals()] == [
            (version, "finished") for version in (0, 2, 4, 5)
        ]
        books.close()
        assert {version for _, version, _ in world.evaluated} == {0, 2, 4, 5}
        for _, version, holds in world.evaluated:
            assert version in holds.values()
        assert await redis.exists(topology.holds(JOB_ID)) == 0
        assert all(server.version == 5 for server in world.servers.values())


async def test_dedicated_server_does_all_evaluations_and_nothing_else(
    redis: Redis, tmp_path: Path
) -> None:
    section = {
        "suite": "s",
        "data": {"path": "/nowhere"},
        "every_steps": 1,
        "max_response_tokens": 8,
        "deadline_s": 20.0,
        "server": "dedicated",
    }
    job = make_job(steps=4, eval=section)
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        await run_to_end(world, crash_at=["published"])
        books = check_books(world)
        evals = books.evals()
        books.close()
        assert [one.state for one in evals] == ["finished"] * 5
        (name,) = {one.replica for one in evals}
        for _, version, holds in world.evaluated:
            assert holds == {name: version}
        assert await redis.exists(topology.holds(JOB_ID)) == 0


async def test_a_dedicated_server_keeps_versions_that_wait_for_it(
    redis: Redis, tmp_path: Path
) -> None:
    """Training goes on while no evaluation is answered, and every version stays to be had."""
    section = {
        "suite": "s",
        "data": {"path": "/nowhere"},
        "every_steps": 1,
        "max_response_tokens": 8,
        "deadline_s": 600.0,
        "server": "dedicated",
    }
    job = make_job(steps=5, eval=section, update={"keep_versions": 1})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.answer_evals = False
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(5)
        kept = {int(path.name[1:]) for path in (tmp_path / "run" / "weights").glob("v*")}
        assert kept >= set(range(5))
        world.answer_evals = True
        for one in range(6):
            await world.tell("eval_finished", eval_id=f"{JOB_ID}.e{one:08d}")
        await running
        await conductor.close("finished")
        check_books(world).close()


async def test_evaluation_without_an_answer_is_given_up(redis: Redis, tmp_path: Path) -> None:
    section = {
        "suite": "s",
        "data": {"path": "/nowhere"},
        "every_steps": 10,
        "max_response_tokens": 8,
        "deadline_s": 1.0,
    }
    async with running_world(redis, tmp_path / "run", job=make_job(eval=section)) as world:
        world.answer_evals = False
        await run_to_end(world)
        failed = world.events("eval_failed")
        assert [event["policy_version"] for event in failed] == [0, 4]
        assert all("deadline" in event["error"] for event in failed)
        check_books(world).close()


async def test_paused_job_goes_on_where_it_was(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6)) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(3)
        conductor.pause_asked.set()
        with pytest.raises(JobPaused, match="on request"):
            await running
        await conductor.close("paused", error="paused on request")
        paused_at = len(world.history)
        assert 3 <= paused_at < 6
        assert (await world.announced()).state == "finished"
        assert (tmp_path / f"run/checkpoints/step{paused_at:08d}").exists()
        await run_to_end(world)
        check_books(world).close()
        assert [step for step, _ in world.history] == [1, 2, 3, 4, 5, 6]  # nothing was replayed


async def test_a_version_refused_beside_a_step_pauses_the_job_after_the_step(
    redis: Redis, tmp_path: Path
) -> None:
    """A pause never comes between a batch and its training, nor between that and its result."""
    job = make_job(steps=5, algorithm={"max_lag": 3}, checkpoint={"every_steps": 2, "keep_last": 1})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.servers["rollout-0"].refuses = {2}
        world.gates |= {2: asyncio.Event(), 3: asyncio.Event()}
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await until(lambda: conductor.parts.progress.step == 2)
        await until(lambda: conductor.parts.collector.num_kept >= 3)  # step 3 can begin
        world.gates[2].set()
        await until(lambda: len(world.events("update_failed")) == MAX_REFUSALS)
        await until(lambda: not any("_offer" in task.get_name() for task in asyncio.all_tasks()))
        assert conductor.parts.progress.step == 3
        assert not running.done()
        world.gates[3].set()
        with pytest.raises(JobPaused, match="version 2 was refused 3 times by"):
            await running
        await conductor.close("paused")
        (step,) = steps_of(world, 3)
        assert step.result is not None
        assert step.told is not None
        assert (tmp_path / "run/checkpoints/step00000003").exists()
        world.servers["rollout-0"].refuses = set()
        await run_to_end(world)
        check_books(world).close()
        assert [step for step, _ in world.history] == [1, 2, 3, 4, 5]


async def test_rolled_back_job_serves_the_old_version_and_waits(
    redis: Redis, tmp_path: Path
) -> None:
    """Also over a restart of the conductor; the current version ends it and training goes on."""
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6), servers=2) as world:
        world.sampling_s = 0.02
        servers = list(world.servers.values())
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(3)
        before = {version: servers[0].weights.get(version) for version in (1, 2)}
        with pytest.raises(LookupError, match="version 77 is not kept"):
            await conductor.parts.rollback.to(77)
        await conductor.parts.rollback.to(2)
        await until(lambda: all(server.version == 2 for server in servers))
        conductor.pause_asked.set()
        with pytest.raises(JobPaused, match="on request"):
            await running
        await conductor.close("paused")
        trained = len(world.history)
        assert 3 <= trained < 6

        again = world.conductor()
        running = asyncio.create_task(again.run())
        late = await world.add_server("rollout-2")
        await until(lambda: late.version is not None)
        assert {server.version for server in (*servers, late)} == {2}
        assert len({server.weights[2] for server in (*servers, late)} | {before[2]}) == 1
        assert len(world.history) == trained
        assert again.parts.publisher.current is not None
        await until(lambda: again.parts.doing.endswith(f", waiting to begin step {trained + 1}"))
        end = f"`tandem weights rollback {JOB_ID} --to {again.parts.publisher.current}` ends it"
        assert f"serving version 2 by a rollback (training waits until {end})" in again.parts.doing
        await again.parts.rollback.to(again.parts.publisher.current)
        await asyncio.wait_for(running, 40)
        await again.close("finished")
        check_books(world).close()
        assert [step for step, _ in world.history] == [1, 2, 3, 4, 5, 6]
        for name, current in (("rollback_started", 3), ("rollback_ended", trained)):
            (event,) = world.events(name)
            assert event["policy_version"] == 2
            assert event["current_version"] >= current
        assert any(event["is_rollback"] for event in world.events("update_committed"))


async def test_a_version_that_is_being_deleted_is_no_way_back(redis: Redis, tmp_path: Path) -> None:
    """Nobody could serve it, and training would wait for good."""
    begun, go_on = threading.Event(), threading.Event()
    job = make_job(update={"keep_versions": 2})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.gates[4] = asyncio.Event()
        conductor = world.conductor()
        rollback, tidy = conductor.parts.rollback, conductor.parts.store.tidy

        def tidy_late(needed: set[int], **how: int) -> list[int]:
            if needed == {3}:
                begun.set()
                assert go_on.wait(20)
            return tidy(needed, **how)

        conductor.parts.store.tidy = tidy_late  # type: ignore[method-assign]
        running = asyncio.create_task(conductor.run())
        await until(begun.is_set)
        going = asyncio.create_task(rollback.to(1))
        await asyncio.wait({going}, timeout=0.5)
        go_on.set()
        with pytest.raises(LookupError, match=r"version 1 is not kept; kept are \[2, 3\]"):
            await going
        assert not rollback.is_on
        world.gates[4].set()
        await asyncio.wait_for(running, 40)
        await conductor.close("finished")
        check_books(world).close()


async def test_a_rollback_that_no_server_accepts_ends_and_training_goes_on(
    redis: Redis, tmp_path: Path
) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6), servers=2) as world:
        world.sampling_s = 0.02
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(3)
        for server in world.servers.values():
            server.refuses = {1}
        for times in (1, 2):  # asked for again it is tried again
            await conductor.parts.rollback.to(1)
            await until(lambda n=times: len(world.events("rollback_failed")) == n)
        await asyncio.wait_for(running, 40)
        await conductor.close("finished")
        check_books(world).close()
        event = world.events("rollback_failed")[0]
        assert event["policy_version"] == 1
        assert event["current_version"] >= 3
        assert "version 1 was refused 3 times by every server. rollout-0: " in event["error"]
        assert len(world.events("update_failed")) == 2 * 2 * 3
        assert {server.version for server in world.servers.values()} == {6}


async def test_a_rollback_to_a_version_with_a_missing_file_is_told_and_costs_nothing(
    redis: Redis, tmp_path: Path
) -> None:
    """When it is asked for; when it goes missing afterwards; and when a new conductor begins."""
    async with running_world(redis, tmp_path / "run", job=make_job(steps=6)) as world:
        world.sampling_s = 0.02
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(3)
        folder = tmp_path / "run" / "weights" / "v00000001"
        (folder / CHANGES_ONLY).touch()
        (folder / shard_file(0)).unlink()
        rollback, store = conductor.parts.rollback, conductor.parts.store
        with pytest.raises(
            WeightsCorrupt, match=r"version 1 cannot be had: .*v00000001/delta-0000"
        ):
            await rollback.to(1)
        assert not rollback.is_on
        store.check = lambda version: None  # type: ignore[method-assign]
        await rollback.to(1)
        await until(lambda: bool(world.events("rollback_failed")))
        assert "version 1: " in world.events("rollback_failed")[0]["error"]

        conductor.pause_asked.set()
        with pytest.raises(JobPaused, match="on request"):
            await running
        await conductor.close("paused")
        again = world.conductor()
        again.parts.books.keep_note(NOTE, "1")
        await asyncio.wait_for(again.run(), 40)
        await again.close("finished")
        check_books(world).close()
        assert len(world.events("rollback_failed")) == 2


async def test_drift_is_attributed_under_the_version_that_is_held_then(
    redis: Redis, tmp_path: Path
) -> None:
    """Asked while step 2 is trained: of step 1, whose weights are another version's by our turn."""
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        world.gates[2] = asyncio.Event()
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await until(lambda: conductor.parts.progress.step == 2)
        assert world.ranks is not None
        world.ranks.has_model = True
        asking = asyncio.create_task(conductor.policy.attribute())
        await until(lambda: bool(conductor.parts.keeper._turn._waiters))
        world.gates[2].set()
        step, held, found = await asyncio.wait_for(asking, 20)
        assert (step, held, found.num_tokens) == (1, 2, 3 * 2 * 4)
        assert world.ranks.climbed == [[0]]  # which sampled step 1
        await asyncio.wait_for(running, 40)
        await conductor.close("finished")


@pytest.mark.parametrize("refused", [set(), {2}, {-2}])
async def test_ranks_that_are_lost_while_drift_is_attributed_train_the_batch_first(
    redis: Redis, tmp_path: Path, refused: set[int]
) -> None:
    """What they hold then is no weights to attribute it under; a batch that they refuse is undone
    as if it had been trained in its turn."""
    job = make_job(attribution={"every_steps": 1})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.has_model = True
        world.rank_faults += ["climb after 1"]
        world.refuse_steps |= refused
        conductor = world.conductor()
        if refused:
            with pytest.raises(JobPaused, match="step 2 was refused"):
                await conductor.run()
            await conductor.close("paused")
            await run_to_end(world)
        else:
            await asyncio.wait_for(conductor.run(), 40)
            await conductor.close("finished")
        check_books(world).close()
        told = [event["step"] for event in world.events("drift_attributed")]
        assert told == ([1, 2, 3, 4] if refused else [1, 3, 4])


async def test_cancelled_job_leaves_nothing_running(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job(steps=1000)) as world:
        conductor = world.conductor()
        running = asyncio.create_task(conductor.run())
        await world.until_served(2)
        await end(running)
        await conductor.close("cancelled")
        assert world.events("job_finished")[-1]["state"] == "cancelled"
        assert (await world.announced()).state == "finished"
        names = [str(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [name for name in names if "Publisher" in name or "running_beside" in name]
        assert 0 < await redis.ttl(topology.groups(JOB_ID)) <= 3600


async def test_refused_step_is_undone(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        world.refuse_steps.add(2)
        conductor = world.conductor()
        with pytest.raises(JobPaused, match="step 2 was refused: too many unusable"):
            await conductor.run()
        await conductor.close("paused")
        await run_to_end(world)
        books = check_books(world)
        assert books.counts()["dropped:refused"] == 3
        books.close()


@pytest.mark.parametrize("faults", [[], ["train_step:3"]])
async def test_a_step_that_is_refused_halfway_is_undone_in_the_weights_too(
    redis: Redis, tmp_path: Path, faults: list[str]
) -> None:
    """Also when it is the replay that meets it; such ranks neither save nor train on."""
    job = make_job(checkpoint={"every_steps": 2})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.refuse_steps.add(-3)
        world.rank_faults += faults
        conductor = world.conductor()
        with pytest.raises(JobPaused, match="step 3 was refused: loss is nan after the step's"):
            await conductor.run()
        await conductor.close("paused")
        assert len(world.events("step")) == 2
        await run_to_end(world)
        books = check_books(world)
        assert books.counts()["dropped:refused"] == 3
        books.close()


async def test_drift_beyond_its_bound_pauses_the_job(redis: Redis, tmp_path: Path) -> None:
    job = make_job(bounds={"max_mean_abs_delta_logprob": 0.2})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.drift = 0.5
        conductor = world.conductor()
        with pytest.raises(JobPaused, match=r"0\.5, above bounds\.max_mean_abs_delta_logprob = 0"):
            await conductor.run()
        await conductor.close("paused")
        assert len(world.events("step")) == 1


async def test_job_without_a_trainable_group_stops_with_reasons(
    redis: Redis, tmp_path: Path
) -> None:
    job = make_job(sampling={"max_redraws": 2.0})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.grade = lambda prompt, index: Score(value=1.0)
        conductor = world.conductor()
        with pytest.raises(JobPaused, match=r"6 groups .* none can be .* \d no_variance_all_right"):
            await conductor.run()
        await conductor.close("paused")


async def test_step_is_cut_short_when_redraws_are_used_up(redis: Redis, tmp_path: Path) -> None:
    job = make_job(steps=1, sampling={"max_redraws": 2.0})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.grade = lambda prompt, index: Score(value=float(prompt.draw == 2 and index))
        await run_to_end(world)
        (step,) = world.events("step")
        assert step["groups"] == 1
        assert step["reward_raw"] == pytest.approx(1 / 12)
        assert step["reward_trained"] == pytest.approx(0.5)


async def test_prompts_that_are_too_long_are_skipped_and_counted(
    redis: Redis, tmp_path: Path
) -> None:
    rows = ["short", "x" * 100, "brief"]
    async with running_world(redis, tmp_path / "run", job=make_job(), rows=rows) as world:
        await run_to_end(world)
        books = check_books(world)
        skipped = world.events("prompt_skipped")
        assert len(skipped) == books.counts()["skipped:too_long"] >= 4
        assert skipped[0] == {"row": 1, "source": "rows, line 2", "tokens": 100, "limit": 56}
        books.close()


async def test_data_set_of_prompts_that_do_not_fit_ends_the_job(
    redis: Redis, tmp_path: Path
) -> None:
    rows = ["x" * 100, "y" * 200]
    async with running_world(redis, tmp_path / "run", job=make_job(), rows=rows) as world:
        conductor = world.conductor()
        with pytest.raises(NoPromptFits, match="none of the 2 prompts fits into 56 tokens"):
            await conductor.run()
        await conductor.close("failed")


async def test_stuck_step_says_who_it_waits_for(redis: Redis, tmp_path: Path) -> None:
    job = make_job(bounds={"step_deadline_s": 1.5}, update={"deadline_s": 0.5})
    async with running_world(redis, tmp_path / "run", job=job, servers=0) as world:
        await world.add_server("rollout-0", frozen=True, samples=False)
        conductor = world.conductor()
        with pytest.raises(JobPaused) as stuck:
            await conductor.run()
        await conductor.close("paused")
    text = str(stuck.value)
    assert "waited 1.5 s for the groups of step 1: 0 of 3 groups are there" in text
    assert "prompts 3, rollouts 0, groups 0" in text
    assert "rollout-0: " in text
    assert "failed updates" in text


async def test_poison_is_buried_and_its_group_replaced(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        poisoned: set[int] = set()

        def grade(prompt: PromptGroup, index: int) -> Outcome:
            if prompt.draw in (1, 5):
                poisoned.add(prompt.draw)
                raise Rejected("cannot be graded")
            return alternating(prompt, index)

        world.grade = grade
        await redis.xadd(topology.groups(JOB_ID), {b"body": b"\xff\x00 no message"})
        await redis.xadd(topology.prompts(JOB_ID), {b"body": b"\xff\x00 no message"})
        await run_to_end(world)
        books = check_books(world)
        assert books.counts()["dropped:buried"] == len(poisoned) == 2
        books.close()
        assert await redis.xlen(topology.dead(topology.groups(JOB_ID))) == 1


async def test_a_requeued_letter_is_handled_and_counts_but_is_not_trained(
    redis: Redis, tmp_path: Path
) -> None:
    """Its group was dropped and replaced when it was buried; what it earned is known late."""
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        is_mended, goes_on = False, asyncio.Event()

        def grade(prompt: PromptGroup, index: int) -> Outcome:
            if prompt.draw == 1 and not is_mended:
                raise Rejected("no grader of that name")
            return alternating(prompt, index)

        async def complete(group: RolloutGroup) -> RolloutGroup:
            if group.prompt.draw > 4:  # the job does not end before the letter is back
                await goes_on.wait()
            return group

        def buried() -> Group | None:
            books = Books(world.run_dir / BOOKS_FILE)
            group = books.group(f"{JOB_ID}.g000001")
            books.close()
            return group if group and group.reason == "buried" else None

        world.grade, world.complete = grade, complete
        running = asyncio.create_task(run_to_end(world))
        await until(lambda: buried() is not None)
        assert not buried().arrived
        is_mended = True
        assert await requeue_dead(redis, topology.rollouts(JOB_ID)) == 1
        await until(lambda: buried().arrived)
        goes_on.set()
        await running
        books = check_books(world)
        assert (books.counts()["dropped:buried"], buried().state) == (1, "dropped")
        books.close()
        assert all("g000001" not in name for _, names in world.history for name in names)
        await check_streams_empty(redis)


async def test_surplus_of_a_step_is_dropped_and_counted(redis: Redis, tmp_path: Path) -> None:
    job = make_job(sampling={"oversampling": 2.0})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.sampling_s = 0.02
        await run_to_end(world)
        books = check_books(world)
        counts = books.counts()
        assert counts["dropped:surplus"] > 0
        assert not world.events("duplicate_refused")
        books.close()


async def test_asynchronous_job_never_trains_beyond_its_lag(redis: Redis, tmp_path: Path) -> None:
    job = make_job(steps=12, algorithm={"max_lag": 2})
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.sampling_s = 0.03
        await run_to_end(world)
        check_books(world).close()
        lags = [step["lag_max"] for step in world.events("step")]
        assert max(lags) <= 2
        assert max(lags) > 0
        dropped = [event["reason"] for event in world.events("group_dropped")]
        assert dropped.count("too_old") <= 2


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  other tasks' plain attributes
            await asyncio.sleep(0.02)
