"""Tasks end even if they ignore a cancel."""

import asyncio

import pytest
import structlog

from shared.tasks import drain, end, following, take, wait_for_event


async def test_task_that_swallows_cancels_is_cancelled_again():
    swallowed = 0

    async def stubborn():
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 3


async def test_task_that_never_ends_is_reported_not_waited_for():
    done = asyncio.Event()

    async def immortal():
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(immortal(), name="immortal")
    await asyncio.sleep(0)
    with structlog.testing.capture_logs() as logs:
        await end(task, within_s=0.3)
    assert not task.done()
    assert logs[-1]["event"] == "task_ignores_cancel"
    done.set()
    await task


async def test_drain_tells_whether_all_came_to_their_own_end():
    quick = asyncio.create_task(asyncio.sleep(0.01))
    assert await drain({quick}, within_s=60)
    slow = asyncio.create_task(asyncio.sleep(60))
    assert not await drain({slow}, within_s=0.05)
    assert slow.cancelled()
    assert await drain(set(), within_s=1)


async def test_following_event_is_set_after_its_leader():
    leader, follower = asyncio.Event(), asyncio.Event()
    async with following(leader, follower):
        assert not await wait_for_event(follower, 0.01)
        leader.set()
        assert await wait_for_event(follower, 60)


async def test_cancel_that_comes_as_the_event_does_is_not_lost():
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, 60))
    await asyncio.sleep(0.01)
    event.set()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_event_and_timeout_are_told_apart():
    event = asyncio.Event()
    assert not await wait_for_event(event, 0.01)
    assert not await wait_for_event(event, 0)
    event.set()
    assert await wait_for_event(event, 0)


async def test_an_item_that_comes_as_a_cancel_does_stays_in_the_queue():
    queue: asyncio.Queue[int] = asyncio.Queue()
    taking = asyncio.create_task(take(queue, 60))
    await asyncio.sleep(0.01)
    queue.put_nowait(7)
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled()
    assert await take(queue, 1) == 7
    with pytest.raises(TimeoutError):
        await take(queue, 0.01)
