"""Ending asyncio tasks for certain.

A single `task.cancel()` can get lost: a task that waits for a network answer with a timeout may
swallow it right after the answer. So we cancel until the task is over, within a deadline.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()
T = TypeVar("T")


async def end(task: asyncio.Task[Any], within_s: float = 5.0) -> None:
    """Cancel the task until it is over; its result is not wanted."""
    deadline_s = time.monotonic() + within_s
    while not task.done() and time.monotonic() < deadline_s:
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
    if not task.done():
        log.error("task_ignores_cancel", task=task.get_name(), after_s=within_s)
    elif not task.cancelled() and (error := task.exception()):
        log.debug("ended_task_had_failed", task=task.get_name(), error=repr(error))


async def drain(tasks: set[asyncio.Task[Any]], within_s: float) -> bool:
    """Wait for the tasks, then end those that are late; whether all came to their own end."""
    if not tasks:
        return True
    _, late = await asyncio.wait(set(tasks), timeout=within_s)
    if late:
        log.warning("tasks_late", tasks=sorted(task.get_name() for task in late), after_s=within_s)
        await asyncio.gather(*(end(task) for task in late))
    return not late


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do the work whole, though this task is cancelled meanwhile; that is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as err:
            cancelled = err
    task.result()
    if cancelled is not None:
        raise cancelled


async def first_of(
    *things: asyncio.Event | asyncio.Task[Any], timeout_s: float | None = None
) -> None:
    """Until one of the events is set or one of the tasks is done, or the time is over."""
    waits = {thing for thing in things if isinstance(thing, asyncio.Task)}
    own = {asyncio.create_task(one.wait()) for one in things if isinstance(one, asyncio.Event)}
    try:
        await asyncio.wait({*waits, *own}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            await end(task)


async def take(queue: "asyncio.Queue[T]", timeout_s: float) -> T:
    """The next item; TimeoutError. One that arrives as a cancel does stays in the queue."""
    async with asyncio.timeout(timeout_s):  # see wait_for_event
        return await queue.get()


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Sleep until the event or the timeout; whether it was the event."""
    with contextlib.suppress(TimeoutError):
        # Python 3.11's `wait_for` loses a cancel that comes as the event does.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@contextlib.asynccontextmanager
async def following(leader: asyncio.Event, follower: asyncio.Event) -> AsyncIterator[None]:
    """Within the block, `follower` is set once `leader` is."""

    async def follow() -> None:
        await leader.wait()
        follower.set()

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        await end(task)
