"""What is drawn while one step is taken and the next one is not yet collected."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer.books import Books
from shared.tasks import end
from tests.integration.conductor_world import make_job, running_world
from tests.integration.test_kept_groups import SMALL, Hand, by_hand, hand_in


async def test_nothing_is_drawn_while_books_and_progress_tell_of_different_steps(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is in the books and its thread has not come back: a draw of that moment would have
    a version that is too old for the step it is for."""
    async with by_hand(redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=SMALL) as hand:
        loop, commit = asyncio.get_running_loop(), Books.commit_batch
        filling: list[asyncio.Task[int]] = []

        async def fill_meanwhile() -> None:
            filling.append(asyncio.create_task(hand.parts.feeder.fill()))
            await asyncio.sleep(0)  # it draws at once, if it may

        def commit_then_fill(self: Books, *args: Any, **fields: Any) -> None:
            commit(self, *args, **fields)
            asyncio.run_coroutine_threadsafe(fill_meanwhile(), loop).result(10)

        monkeypatch.setattr(Books, "commit_batch", commit_then_fill)
        await hand.give([0, 1], version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        await asyncio.wait_for(filling[0], 60)
        entries = hand.parts.books.open_groups()
        assert [(entry.draw, entry.min_policy_version) for entry in entries[2:]] in (
            [],  # before version 1 was published, or after
            [(4, 1), (5, 1)],
        )


async def test_jobs_that_ask_in_waves_draw_nothing_between_a_choice_and_its_commit(
    redis: Redis, tmp_path: Path
) -> None:
    """The surplus of four draws is dropped; who looks for lost groups then must not fill its slots,
    or the next step's draws would depend on when that was."""
    sampling = SMALL | {"oversampling": 2.0}
    async with by_hand(redis, tmp_path / "run", sampling=sampling) as hand:
        assert hand.parts.job.asks_in_waves
        await hand.give(range(4), version=0, rewards=(0.0, 1.0))
        groups = await hand.parts.collector.take(deadline_s=10)
        await hand.parts.collector.drop_kept(reason="surplus")
        assert await hand.parts.watch.audit() == 0
        await hand.conductor._commit(groups)
        assert hand.parts.books.next_draw() == 4
        assert hand.parts.books.counts()["open"] == 0


async def test_overtaken_groups_are_replaced_while_the_step_trains(
    redis: Redis, tmp_path: Path
) -> None:
    """By the version that is served, and not only once the next step is collected."""
    sampling = SMALL | {"oversampling": 2.0}
    async with by_hand(
        redis, tmp_path / "run", algorithm={"max_lag": 1}, sampling=sampling
    ) as hand:
        hand.parts.progress.usable_share = 0.2
        await hand.parts.feeder.fill()
        await hand.give(range(8), version=0, rewards=(0.0, 1.0))
        assert await hand.step() == [0, 1]
        hand.world.gates[2] = asyncio.Event()
        second = asyncio.create_task(hand.conductor._step())
        try:
            async with asyncio.timeout(60):
                while "training step 2" not in hand.parts.progress.doing:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert hand.parts.books.counts()["dropped:too_old"] == 4
            entries = hand.parts.books.open_groups()
            assert [(entry.draw, entry.min_policy_version) for entry in entries] == [(8, 1), (9, 1)]
        finally:
            await end(second)


async def test_another_process_admits_what_the_one_that_died_would_have(
    redis: Redis, tmp_path: Path
) -> None:
    """From the books alone, once what was kept has come again."""

    def seen(hand: Hand) -> tuple[Any, ...]:
        p = hand.parts
        out, num_held = p.feeder._line()
        return out, num_held, p.admission.min_policy_version(num_held, out, p.progress)

    job = make_job(algorithm={"max_lag": 2}, sampling=SMALL)
    async with running_world(redis, tmp_path / "run", job=job, servers=0) as world:
        async with hand_in(world) as hand:
            await hand.give([0, 1, 3], version=0, rewards=(0.0, 1.0))
            assert await hand.step() == [0, 1]
            await hand.give([2], version=1, rewards=(1.0, 1.0))  # cannot be used
            await hand.parts.feeder.fill()
            before = seen(hand)
            assert before[1] == 1
        async with hand_in(world) as hand:
            await hand.until_all_settled()
            assert seen(hand) == before
