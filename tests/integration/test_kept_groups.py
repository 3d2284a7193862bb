"""Groups handed in one by one: what is kept over steps, overtaken, late, and counted where."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer import watch
from services.trainer.batches import KeptGroup
from services.trainer.conductor import Conductor
from services.trainer.recording import Recording
from shared import topology
from shared.messages import PromptGroup, Score, ScoredGroup
from shared.streams import publish
from shared.tasks import end
from tests.integration.conductor_world import (
    JOB_ID,
    World,
    graded,
    make_job,
    run_to_end,
    running_world,
    sampled,
)

SMALL = {"groups_per_step": 2}


class Hand:
    """A conductor whose collector runs, and whose groups and steps come when the test says so."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.conductor: Conductor = world.conductor()
        self.parts = self.conductor.parts

    async def give(self, draws: Iterable[int], *, version: int, rewards: tuple[float, float]):
        """Graded groups of these draws, as a server at `version` would have sampled them."""
        source = self.parts.source
        for draw in draws:
            entry = self.parts.books.group(f"{JOB_ID}.g{draw:06d}")
            assert entry is not None
            prompt = source.group(draw, min_policy_version=entry.min_policy_version)
            assert isinstance(prompt, PromptGroup)
            scored = graded(sampled(prompt, version), lambda _, i: Score(value=rewards[i]))
            await publish(self.world.redis, topology.groups(JOB_ID), scored.pack())
        await self.until_all_settled()

    async def until_all_settled(self) -> None:
        """Everything handed in was judged: what is left in the stream is what is held."""
        stream, held = topology.groups(JOB_ID), self.parts.collector.held_ids
        async with asyncio.timeout(60):
            while await self.world.redis.xlen(stream) != len(held()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def step(self) -> list[int]:
        """Collect and train one step, and act as if its version were served; its draws."""
        is_last_use = self.conductor._is_last_use
        groups: list[KeptGroup] = await self.parts.collector.take(deadline_s=10)
        if is_last_use:
            await self.parts.collector.drop_kept(reason="surplus")
        number = await self.conductor._commit(groups)
        if is_last_use:
            await self.parts.collector.drop(self.parts.books.open_groups(), reason="surplus")
        await self.conductor._steps.train(number)
        await self.parts.collector.finish(groups)
        self.parts.progress.published_version = self.parts.progress.policy_version
        return [group.draw for group in groups]

    def facts(self, step: int) -> dict[str, Any]:
        return self.parts.books.steps(step)[0].batch_facts


@contextlib.asynccontextmanager
async def by_hand(redis: Redis, run_dir: Path, **sections: Any) -> AsyncIterator[Hand]:
    job = make_job(**sections)
    async with running_world(redis, run_dir, job=job, servers=0) as world, hand_in(world) as hand:
        yield hand


@contextlib.asynccontextmanager
async def hand_in(world: World) -> AsyncIterator[Hand]:
    hand, stop = Hand(world), asyncio.Event()
    await hand.conductor._steps.restore()
    hand.parts.progress.published_version = hand.parts.progress.policy_version
    await hand.parts.feeder.fill()
    collecting = asyncio.create_task(hand.parts.collector.run(stop))
    try:
        yield hand
    finally:
        stop.set()
        await asyncio.wait_for(collecting, 60)
        await end(collecting)
        await hand.conductor.close(None)


async def test_groups_kept_over_steps_are_dropped_once_a_version_has_overtaken_them(
    redis: Redis, tmp_path: Path
) -> None:
    """All eight are of version 0 and usable. With a lag of 1 two steps may train four of them; the
    third step may not have the others, counts them, and waits for newer ones."""
    sampling = SMALL | {"oversampling": 2.0}
    async with by_hand(
        redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=sampling
    ) as hand:
        books, collector = hand.parts.books, hand.parts.collector
        assert books.next_draw() == 4  # the others' version is too early as long as all are usable
        hand.parts.progress.usable_share = 0.2
        await hand.parts.feeder.fill()
        assert books.next_draw() == 8
        await hand.give(range(8), version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        await hand.parts.feeder.fill()
        assert await hand.step() == [2, 3]
        assert collector.num_kept == 4
        third = asyncio.create_task(hand.step())
        async with asyncio.timeout(60):
            while books.next_draw() == 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert collector.num_kept == 0
        assert books.counts()["dropped:too_old"] == 4
        newer = [entry.draw for entry in books.open_groups()]
        assert newer == [8, 9, 10, 11]  # further ones would need a version that is not there
        assert all(entry.min_policy_version >= 1 for entry in books.open_groups())
        await hand.give(newer[:2], version=2, rewards=(1.0, 0.0))
        assert await asyncio.wait_for(third, 60) == newer[:2]
        steps = [hand.facts(step) for step in (1, 2, 3)]
        assert [step["lag_max"] for step in steps] == [0, 1, 0]
        assert [step["graded_samples"] for step in steps] == [4, 4, 12]  # the overtaken ones, too
        assert {event["reason"] for event in hand.world.events("group_dropped")} == {"too_old"}


async def test_a_group_overtaken_while_it_was_judged_is_not_trained(
    redis: Redis, tmp_path: Path
) -> None:
    """It comes in time and is kept; the next take finds that the policy has moved on by two."""
    async with by_hand(redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=SMALL) as hand:
        await hand.give([3], version=0, rewards=(0.0, 1.0))
        await hand.give([0, 1], version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        await hand.parts.feeder.fill()
        await hand.give([2, 4], version=1, rewards=(0.0, 1.0))
        assert await hand.step() == [2, 3]  # at its bound: a lag of one
        hand.parts.progress.policy_version += 2
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hand.parts.collector.take(deadline_s=10), 2.0)
        assert hand.parts.books.group(f"{JOB_ID}.g000004").reason == "too_old"


async def test_the_oldest_versions_are_trained_first(redis: Redis, tmp_path: Path) -> None:
    """Draw 5 replaced one that was dropped; a step later its version would be too old."""
    async with by_hand(redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=SMALL) as hand:
        await hand.give([0, 1], version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        await hand.parts.feeder.fill()
        await hand.give([2, 4], version=1, rewards=(0.0, 1.0))
        await hand.give([5], version=0, rewards=(0.0, 1.0))
        await hand.until_all_settled()
        assert await hand.step() == [2, 5]
        assert hand.facts(2)["lag_max"] == 1


async def test_a_group_overtaken_while_its_routes_come_is_not_trained(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw 1 is in time when it is judged, and is kept while draw 0 is dropped as too old."""
    async with by_hand(redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=SMALL) as hand:
        books, collector, progress = hand.parts.books, hand.parts.collector, hand.parts.progress
        progress.policy_version = 1
        await hand.give([0], version=0, rewards=(0.0, 1.0))
        await hand.give([2], version=1, rewards=(0.0, 1.0))
        judged, overtaken = asyncio.Event(), asyncio.Event()
        withdraw = hand.parts.feeder.withdraw

        async def fetch(_: Any) -> None:
            judged.set()
            await overtaken.wait()

        async def withdraw_slowly(names: Iterable[str]) -> None:
            overtaken.set()
            await hand.until_all_settled()
            await withdraw(names)

        monkeypatch.setattr(collector._routes, "fetch", fetch)
        monkeypatch.setattr(hand.parts.feeder, "withdraw", withdraw_slowly)
        coming = asyncio.create_task(hand.give([1], version=0, rewards=(0.0, 1.0)))
        await asyncio.wait_for(judged.wait(), 60)
        progress.policy_version = 2
        taking = asyncio.create_task(collector.take(deadline_s=10))
        await asyncio.wait_for(coming, 60)
        await hand.give([3], version=2, rewards=(0.0, 1.0))
        assert [group.draw for group in await taking] == [2, 3]
        assert {books.group(f"{JOB_ID}.g{draw:06d}").reason for draw in (0, 1)} == {"too_old"}


async def test_every_graded_sample_counts_once_however_late_it_comes(
    redis: Redis, tmp_path: Path
) -> None:
    """Four draws for steps of two. Surplus that is there counts in its step, what comes later in
    the next one; a second copy, or one of a trained group, counts nowhere."""
    sampling = SMALL | {"oversampling": 2.0}
    async with by_hand(
        redis, tmp_path / "run", sampling=sampling, record=True, deterministic=False
    ) as hand:
        books = hand.parts.books
        await hand.give([0, 1, 3], version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]  # draw 3 is there and not needed, draw 2 under way
        assert (hand.facts(1)["graded_samples"], hand.facts(1)["reward_raw"]) == (6, 0.5)
        for _ in range(2):
            await hand.give([2], version=0, rewards=(1.0, 1.0))
        await hand.give([0, 3], version=0, rewards=(1.0, 1.0))
        await hand.parts.feeder.fill()
        await hand.give([4, 5], version=1, rewards=(0.0, 1.0))
        assert await hand.step() == [4, 5]
        assert hand.facts(2)["graded_samples"] == 6
        assert hand.facts(2)["reward_raw"] == pytest.approx(4 / 6)
        assert hand.facts(2)["reward_trained"] == pytest.approx(0.5)
        assert books.num_unusable_during(2) == 0  # nor do they count against the step's bounds
        assert hand.parts.recording is not None
        assert hand.parts.recording.group_ids() == [f"{JOB_ID}.g{i:06d}" for i in range(6)]


async def test_a_late_group_is_recorded_before_it_is_counted(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the process die in between, it comes again: not counted yet, it is no duplicate."""
    sampling, name = SMALL | {"oversampling": 2.0}, f"{JOB_ID}.g000002"
    async with by_hand(
        redis, tmp_path / "run", sampling=sampling, record=True, deterministic=False
    ) as hand:
        books, keep_group = hand.parts.books, Recording.keep_group
        counted: list[bool] = []

        def keep(self: Recording, scored: ScoredGroup) -> None:
            counted.append(books.group(scored.group.prompt.group_id).arrived)
            keep_group(self, scored)

        await hand.give([0, 1, 3], version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        monkeypatch.setattr(Recording, "keep_group", keep)
        for _ in range(2):
            await hand.give([2], version=0, rewards=(1.0, 1.0))
        assert counted == [False]
        assert books.group(name).arrived
        assert name in hand.parts.recording.group_ids()


async def test_what_comes_while_a_batch_is_written_counts_in_the_next_step(
    redis: Redis, tmp_path: Path
) -> None:
    sampling = SMALL | {"oversampling": 2.0}
    async with by_hand(redis, tmp_path / "run", sampling=sampling, deterministic=False) as hand:
        await hand.give([0, 1], version=0, rewards=(0.0, 1.0))
        groups = await hand.parts.collector.take(deadline_s=10)
        batch = hand.conductor._steps.batch(groups)
        dropped = hand.parts.books.close_collection(1)
        await hand.give([2], version=0, rewards=(1.0, 1.0))  # no variance
        await hand.conductor._steps.commit_groups(batch, groups, dropped)
        assert hand.facts(1)["graded_samples"] == 4
        assert hand.parts.books.dropped_during(2).num_rewards == 2


async def test_a_group_that_is_buried_while_others_are_looked_for_is_not_lost(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is in no stream when the look begins to end, and a dead letter when it has."""
    look = watch.groups_under_way

    async def slow_look(redis: Redis, job_id: str) -> set[str]:
        found = await look(redis, job_id)
        prompt = hand.parts.source.group(0, min_policy_version=0)
        assert isinstance(prompt, PromptGroup)
        scored = graded(sampled(prompt, 7), lambda _, i: Score(value=i))  # of a later version
        await publish(redis, topology.groups(JOB_ID), scored.pack())
        async with asyncio.timeout(60):
            while not await redis.xlen(topology.dead(topology.groups(JOB_ID))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(watch, "groups_under_way", slow_look)
    async with by_hand(redis, tmp_path / "run", sampling=SMALL) as hand:
        await redis.delete(topology.prompts(JOB_ID))
        assert await hand.parts.watch.audit() == 1
        fed = {entry.draw: entry.times_fed for entry in hand.parts.books.open_groups()}
        assert fed == {1: 2, 2: 1}  # draw 1 was lost, draw 2 is there instead of draw 0
        assert hand.parts.books.counts()["dropped:buried"] == 1


async def test_rewards_of_a_refused_step_count_in_the_step_taken_instead(
    redis: Redis, tmp_path: Path
) -> None:
    async with by_hand(redis, tmp_path / "run", sampling=SMALL) as hand:
        await hand.give([0, 1], version=0, rewards=(0.0, 1.0))
        hand.world.refuse_steps.add(1)
        with contextlib.suppress(Exception):
            await hand.step()
        assert hand.parts.books.counts()["dropped:refused"] == 2
        await hand.parts.feeder.fill()
        await hand.give([2, 3], version=0, rewards=(1.0, 0.5))
        hand.parts.collector._taken = {}
        assert await hand.step() == [2, 3]
        assert hand.facts(1)["graded_samples"] == 8
        assert hand.facts(1)["reward_raw"] == pytest.approx((2 + 3) / 8)


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_whole_runs_count_as_many_samples_as_were_graded(
    redis: Redis, tmp_path: Path, max_lag: int
) -> None:
    """Two servers, oversampling, dropped groups, three deaths: the curve has every sample that came
    before the last step was chosen, and the books have the rest."""
    job = make_job(
        steps=6, algorithm={"max_lag": max_lag}, sampling={"oversampling": 1.7, "max_redraws": 20.0}
    )
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        world.sampling_s = 0.01
        await run_to_end(world, crash_at=["packed", "committed", "acked"])
        last = world.conductor()
        books = last.parts.books
        counted = [made.batch_facts["graded_samples"] for made in books.steps()]
        after = books.dropped_during(7).num_rewards
        arrived = books._one("SELECT COUNT(*) FROM groups WHERE arrived")
        assert sum(counted) + after == 2 * arrived
        await last.close(None)
