import asyncio
import contextlib

import pytest

from services.trainer.beside import running_beside


class Died(Exception):
    pass


async def until_stopped(stop: asyncio.Event) -> None:
    await stop.wait()


async def test_death_of_a_worker_ends_the_block() -> None:
    async def dies(stop: asyncio.Event) -> None:
        raise Died("it was me")

    with pytest.raises(Died, match="it was me"):
        async with running_beside([until_stopped, dies], goodbye_s=1.0):
            await asyncio.sleep(10)


async def test_a_death_is_told_again_to_a_block_whose_wait_swallowed_it() -> None:
    async def dies(stop: asyncio.Event) -> None:
        raise Died("it was me")

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
    async def dies(stop: asyncio.Event) -> None:
        raise Died("it was me")

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
