"""At-least-once work queues on Redis Streams, and fan-out for news.

A message is in the group's pending list from the moment a worker reads it until it is acked. While
it is held its lease is renewed; a worker that dies stops renewing, and whoever polls next takes the
message over. A message that keeps failing moves to the dead stream with the reason; no message's
failure touches another.

    publish ──> stream ──new──────────> held (lease renewed) ──handler returned──> XACK + XDEL
                  ^   ──taken over───>    │  Rejected, or max_deliveries reached ─> <stream>.dead
                  └──────── handed back ──┘  Retryable, other errors: comes again after a delay
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.dead_letters import DeadLetter, dead_letters, requeue_dead
from shared.redis import MAX_BLOCK_S
from shared.session import Delivery, Handler, Session, entries_of
from shared.tasks import drain, end, following

__all__ = [
    "Consumer",
    "DeadLetter",
    "Delivery",
    "Handler",
    "Session",
    "announce",
    "backlog",
    "dead_letters",
    "publish",
    "read_from",
    "requeue_dead",
]


async def publish(redis: Redis, stream: str, body: bytes) -> bytes:
    """Append one message; its entry id. An answer lost on the way may append it twice."""
    return cast(bytes, await redis.xadd(stream, {b"body": body}))


async def backlog(redis: Redis, stream: str, group: str) -> int:
    """Messages not finished yet: never read, or read and not acked. Producers wait on this."""
    try:
        groups = await redis.xinfo_groups(stream)
    except ResponseError as err:
        if "no such key" in str(err):
            return 0
        raise
    for info in groups:
        if info["name"] == group.encode() and info["lag"] is not None:
            return int(info["pending"]) + int(info["lag"])
    return int(
        await redis.xlen(stream)
    )  # acked entries are deleted, so what is there is unfinished


async def announce(
    redis: Redis, stream: str, body: bytes, *, current_key: str | None = None, keep: int = 10_000
) -> bytes:
    """Append news to a fan-out stream of about `keep` entries; late joiners read `current_key`."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.xadd(stream, {b"body": body}, maxlen=keep, approximate=True)
        if current_key is not None:
            pipe.set(current_key, body)
        return cast(bytes, (await pipe.execute())[0])


async def read_from(
    redis: Redis, stream: str, last_id: bytes, block_s: float = 0.0, limit: int = 1000
) -> list[tuple[bytes, bytes]]:
    """News after `last_id` (b"0" for all) as (entry id, body); waits up to `block_s` for the first.

    Waits of more than `MAX_BLOCK_S` would look like a dead broker and are cut to that.
    """
    block_ms = max(1, int(min(block_s, MAX_BLOCK_S) * 1000)) if block_s > 0 else None
    reply: Any = await redis.xread({stream: last_id}, count=limit, block=block_ms)
    return [(entry_id, fields.get(b"body", b"")) for entry_id, fields in entries_of(reply)]


@dataclass(frozen=True, slots=True)
class Consumer:
    """One member of a consumer group. `name` is the replica's: a restart finds its own work."""

    redis: Redis
    stream: str
    group: str
    name: str
    lease_s: float = 30.0
    max_deliveries: int = 5
    max_retries: int = 100
    retry_s: float = 1.0
    block_s: float = 1.0
    max_body_bytes: int = 64 * 2**20
    on_group_lost: Callable[[], None] | None = None  # the broker came back without its data

    def __post_init__(self) -> None:
        if self.block_s > MAX_BLOCK_S:
            raise ValueError(f"block_s {self.block_s} exceeds {MAX_BLOCK_S}, the client's patience")

    async def run(
        self, handler: Handler, *, stop: asyncio.Event, concurrency: int = 1, drain_s: float = 20.0
    ) -> None:
        """Handle messages until `stop`, then let running handlers finish for `drain_s`.

        A message is acked after its handler returned. Raises what ends the process: `Fatal` from a
        handler, or a broker that stayed away beyond its client's patience.
        """
        halt = asyncio.Event()
        running: set[asyncio.Task[None]] = set()
        crashed: list[asyncio.Task[None]] = []

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled() and task.exception():
                crashed.append(task)
                halt.set()

        async with self.session() as session, following(stop, halt):
            async for delivery in session.deliveries(halt, max_unacked=concurrency):
                task = asyncio.create_task(session.process(delivery, handler))
                running.add(task)
                task.add_done_callback(ended)
            await drain(running, drain_s if stop.is_set() else 2.0)
        for task in crashed:
            task.result()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator["Session"]:
        """Hold messages under lease. Leaving hands the unacked ones back for others to take."""
        session = Session(self)
        await session.ensure_group()
        renewing = asyncio.create_task(session.renew_leases())
        try:
            yield session
        finally:
            await end(renewing)
            await session.close()
