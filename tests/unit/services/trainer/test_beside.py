import asyncio
import contextlib

import pytest

from services.trainer.beside import running_beside


class Died(Exception):
    pass


async def until_stopped(stop: asyncio.Event) -> None:
    await stop.wait()


async def dies(stop: asyncio.Event) -> None:
    raise Died("it was me")


async def test_death_of_a_worker_ends_the_block() -> None:
    with pytest.raises(Died, match="it was me"):
        async with running_beside([until_stopped, dies], goodbye_s=1.0):
            await asyncio.sleep(10)


async def test_a_death_is_told_again_to_a_block_whose_wait_swallowed_it() -> None:
    async def swallows_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)
        await asyncio.sleep(100)

    with pytest.raises(Died, match="it was me"):
        async with running_beside([until_stopped, dies], goodbye_s=0.05):
            await swallows_one()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_death_is_not_lost_on_a_block_that_ends_as_it_is_told() -> None:
    async def ends_well() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)

    with pytest.raises(Died, match="it was me"):
        async with running_beside([dies], goodbye_s=60.0):
            await ends_well()


async def test_workers_end_with_the_block() -> None:
    ended = []

    async def worker(stop: asyncio.Event) -> None:
        await stop.wait()
        await asyncio.sleep(0.05)
        ended.append(1)

    async with running_beside([worker, worker], goodbye_s=60.0):
        await asyncio.sleep(0)
    assert len(ended) == 2


async def test_error_of_the_block_is_its_own() -> None:
    with pytest.raises(KeyError):
        async with running_beside([until_stopped], goodbye_s=1.0):
            raise KeyError("mine")


async def test_repeated_cancels_do_not_leave_workers_behind() -> None:
    workers: list[asyncio.Task] = []

    async def slow_to_end(stop: asyncio.Event) -> None:
        workers.append(asyncio.current_task())
        await stop.wait()
        await asyncio.sleep(0.2)

    async def block() -> None:
        async with running_beside([slow_to_end], goodbye_s=60.0):
            await asyncio.sleep(10)

    running = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    while not running.done():
        running.cancel()
        await asyncio.wait({running}, timeout=0.02)
    assert running.cancelled()
    assert [worker.done() for worker in workers] == [True]


async def test_worker_that_ignores_its_stop_is_cancelled() -> None:
    async def deaf(stop: asyncio.Event) -> None:
        await asyncio.sleep(100)

    async with asyncio.timeout(60):
        async with running_beside([deaf], goodbye_s=0.05):
            await asyncio.sleep(0)


async def test_deaths_together_leave_the_block_its_cleanup() -> None:
    """As when the broker is gone: each worker dies of it, a moment apart."""
    ended = []

    def dies_after(seconds: float, text: str):
        async def dies(stop: asyncio.Event) -> None:
            await asyncio.sleep(seconds)
            raise Died(text)

        return dies

    async def block() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.2)
            ended.append(1)

    workers = [dies_after(0.0, "the first"), dies_after(0.05, "the second")]
    with pytest.raises(Died, match="the first"):
        async with running_beside(workers, goodbye_s=60.0):
            await block()
    assert ended == [1]


async def test_a_worker_that_ends_as_cancelled_by_nobody_has_died() -> None:
    """What it waited for was cancelled, not the worker."""

    async def waits_for_a_cancelled_one(stop: asyncio.Event) -> None:
        inner = asyncio.create_task(stop.wait())
        inner.cancel()
        await inner

    with pytest.raises(RuntimeError, match="was cancelled"):
        async with asyncio.timeout(5), running_beside([waits_for_a_cancelled_one], goodbye_s=1.0):
            await asyncio.sleep(100)


async def test_what_cancels_all_tasks_is_not_taken_for_a_death() -> None:
    """As the end of an event loop does."""
    before = asyncio.all_tasks()

    async def block() -> None:
        async with running_beside([until_stopped], goodbye_s=1.0):
            await asyncio.sleep(100)

    running = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
