"""Where messages go that can never be handled: a stream beside the work stream, with the reason.

A letter keeps the body, so that it can be looked at and, once the cause is gone, requeued. A body
beyond the consumer's bound is kept as an excerpt only.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis

from shared import topology

_EXCERPT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class DeadLetter:
    dead_id: bytes
    entry_id: bytes  # in the work stream
    body: bytes
    body_bytes: int  # of the original; more than `body` has when that is an excerpt
    reason: str
    consumer: str
    times_delivered: int
    buried_at_s: float


def letter_fields(
    entry_id: bytes,
    body: bytes,
    *,
    reason: str,
    consumer: str,
    times_delivered: int,
    max_body_bytes: int,
) -> dict[bytes, Any]:
    return {
        b"entry_id": entry_id,
        b"body": body if len(body) <= max_body_bytes else body[:_EXCERPT_BYTES],
        b"body_bytes": len(body),
        b"reason": reason,
        b"consumer": consumer,
        b"times_delivered": times_delivered,
        b"buried_at_s": time.time(),
    }


async def dead_letters(redis: Redis, stream: str, limit: int = 100) -> list[DeadLetter]:
    """The oldest buried messages of a work stream."""
    rows = await redis.xrange(topology.dead(stream), count=limit)
    return [_letter(dead_id, fields) for dead_id, fields in cast(Any, rows)]


async def requeue_dead(redis: Redis, stream: str, ids: Sequence[bytes] | None = None) -> int:
    """Put buried messages back as new ones: those with `ids` (dead ids), or all; how many.

    An excerpt stays where it is. Should the process die between, a message is never lost.
    """
    letters = await dead_letters(redis, stream, limit=10_000)
    chosen = [
        letter
        for letter in letters
        if (ids is None or letter.dead_id in ids) and len(letter.body) == letter.body_bytes
    ]
    for letter in chosen:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.xadd(stream, {b"body": letter.body})
            pipe.xdel(topology.dead(stream), letter.dead_id)
            await pipe.execute()
    return len(chosen)


def _letter(dead_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        dead_id=dead_id,
        entry_id=fields[b"entry_id"],
        body=fields[b"body"],
        body_bytes=int(fields[b"body_bytes"]),
        reason=fields[b"reason"].decode(),
        consumer=fields[b"consumer"].decode(),
        times_delivered=int(fields[b"times_delivered"]),
        buried_at_s=float(fields[b"buried_at_s"]),
    )
