"""Server-sent events from the file of a run, for browsers and the CLI."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from services.trainer.events import EventTail

POLL_S = 0.2
KEEP_ALIVE_S = 10.0


async def event_stream(
    path: Path, *, after: int, ended: Callable[[], str | None], leaving: Callable[[], bool]
) -> AsyncIterator[str]:
    """Lines after line `after` as they come; `event: end` once the job's last one is sent.

    `ended` says the job's last state once it has one, `leaving` that this process stops: then the
    stream just breaks off, and the reader comes back.
    """
    tail = EventTail(path, after=after)
    spoke_at_s = time.monotonic()
    while not leaving():
        state = ended()  # before reading: what was written before the end is then read
        lines = tail.read_more()
        if lines:
            spoke_at_s = time.monotonic()
            yield "".join(f"id: {number}\ndata: {line}\n\n" for number, line in lines)
        elif state is not None:
            yield f"event: end\ndata: {json.dumps({'state': state})}\n\n"
            return
        elif time.monotonic() - spoke_at_s > KEEP_ALIVE_S:
            spoke_at_s = time.monotonic()
            yield ": keep-alive\n\n"
        else:
            await asyncio.sleep(POLL_S)
