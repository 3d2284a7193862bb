"""Runs loops beside a block: they end with it, and the death of one ends the block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from shared.tasks import drain, wait_for_event

Worker = Callable[[asyncio.Event], Awaitable[None]]


@contextlib.asynccontextmanager
async def running_beside(workers: Sequence[Worker], *, goodbye_s: float) -> AsyncIterator[None]:
    """Raises in the block, at its next wait, what a worker raised.

    At the block's end the workers get their stop event and `goodbye_s` to return. The first death
    alone is told: the block may be cleaning up when others die. A block that is still there
    `goodbye_s` later is told again: a wait that ends as it is cancelled may have swallowed that
    (see shared.tasks).
    """
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None
    failures: list[BaseException] = []
    num_cancels = 0

    async def keep(worker: Worker) -> None:
        nonlocal num_cancels
        this = asyncio.current_task()
        assert this is not None
        try:
            await worker(stop)
        except BaseException as err:
            if stop.is_set() or this.cancelling():
                raise
            if isinstance(err, asyncio.CancelledError):
                err = RuntimeError(f"{this.get_name()}: something it waited for was cancelled")
            failures.append(err)
            while not stop.is_set() and err is failures[0]:
                num_cancels += main.cancel()
                await wait_for_event(stop, goodbye_s)

    tasks = {
        asyncio.create_task(keep(worker), name=getattr(worker, "__qualname__", repr(worker)))
        for worker in workers
    }
    try:
        try:
            yield
        finally:
            stop.set()
            await _uninterrupted(asyncio.create_task(drain(set(tasks), goodbye_s)))
    except asyncio.CancelledError:
        if not failures:
            raise
    finally:
        for _ in range(num_cancels):
            main.uncancel()
    if failures:
        raise failures[0] from None


async def _uninterrupted(task: asyncio.Task[bool]) -> None:
    """Wait for a task that ends soon, even if we are cancelled, and again, meanwhile."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
