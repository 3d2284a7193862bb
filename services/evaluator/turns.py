"""What people ask for, carried out one after the other until a stop.

add ──> waiting ──> carry_out ──┬──> next
            a stop: `drain_s` ──┴──> `abandon`, and the work is ended
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from shared.tasks import end, take

Asked = TypeVar("Asked")

POLL_S = 0.5


class Turns(Generic[Asked]):
    """`carry_out` handles what may go wrong with one; what it raises ends the process."""

    def __init__(
        self,
        carry_out: Callable[[Asked], Coroutine[Any, Any, None]],
        abandon: Callable[[Asked], None],
        *,
        drain_s: float,
    ) -> None:
        self._carry_out = carry_out
        self._abandon = abandon
        self._drain_s = drain_s
        self._waiting: asyncio.Queue[Asked] = asyncio.Queue()

    def add(self, asked: Asked) -> None:
        self._waiting.put_nowait(asked)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, which gives the one in progress `drain_s` to end."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not stop.is_set():
                try:
                    asked = await take(self._waiting, POLL_S)
                except TimeoutError:
                    continue
                await self._until(stopped, asked)
        finally:
            await end(stopped)

    async def _until(self, stopped: "asyncio.Task[bool]", asked: Asked) -> None:
        work = asyncio.create_task(self._carry_out(asked), name="asked_for")
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({work}, timeout=self._drain_s)
            if work.done():
                work.result()
            else:
                self._abandon(asked)
        finally:
            await end(work)
