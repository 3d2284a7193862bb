"""Messages of a rank: who may overtake whom, and that nothing is lost or doubled meanwhile."""

import asyncio
import random

from redis.asyncio import Redis

from shared.ranked import publish_ranked
from shared.streams import Consumer, entries_of, publish

STREAM, GROUP = "ranked", "workers"


async def ordered(redis: Redis) -> list[bytes]:
    entries = await redis.xrange(STREAM)
    return [fields[b"body"] for _, fields in entries]


async def publish_all(redis: Redis, *ranks: str) -> dict[bytes, bytes]:
    messages = [(rank, f"body {rank}".encode()) for rank in ranks]
    ids, moved = await publish_ranked(redis, STREAM, messages, group=GROUP)
    bodies = [fields[b"body"] for one in ids for _, fields in await redis.xrange(STREAM, one, one)]
    assert bodies == [body for _, body in messages]  # each under the id that is told
    return moved


async def test_a_lower_rank_is_read_first_and_equal_ones_keep_their_order(redis: Redis) -> None:
    await publish(redis, STREAM, b"without a rank")
    assert await publish_all(redis, "c", "a") == {}
    before = {body: one for one, fields in await redis.xrange(STREAM) for body in fields.values()}
    moved = await publish_all(redis, "b", "d", "a")
    expected = ["without a rank", "body a", "body a", "body b", "body c", "body d"]
    assert await ordered(redis) == [text.encode() for text in expected]
    assert list(moved) == [before[b"body c"]]
    assert await redis.xrange(STREAM, moved[before[b"body c"]], count=1)


async def test_what_was_read_is_not_moved(redis: Redis) -> None:
    await redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    await publish_all(redis, "b", "c")
    reply = await redis.xreadgroup(GROUP, "one", {STREAM: ">"}, count=1)
    moved = await publish_all(redis, "a")
    ((read_id, _),) = entries_of(reply)
    assert len(moved) == 1
    assert read_id not in moved
    assert (await redis.xrange(STREAM))[0][0] == read_id
    assert await ordered(redis) == [b"body b", b"body a", b"body c"]


async def test_nothing_is_lost_or_doubled_while_others_read(redis: Redis) -> None:
    """Two consumers take messages while many more overtake each other."""
    noise, handled, stop = random.Random(1), list[bytes](), asyncio.Event()

    async def handle(body: bytes) -> None:
        handled.append(body)
        if len(handled) == 300:
            stop.set()

    async def produce() -> None:
        for number in range(100):
            ranks = [f"{noise.random():.6f} {number} {i}" for i in range(3)]
            await publish_all_blindly(redis, ranks)

    readers = [Consumer(redis, STREAM, GROUP, name, block_s=0.05) for name in ("one", "two")]
    await asyncio.gather(produce(), *(reader.run(handle, stop=stop) for reader in readers))
    assert len(handled) == len(set(handled)) == 300
    assert await redis.xlen(STREAM) == 0


async def publish_all_blindly(redis: Redis, ranks: list[str]) -> None:
    await publish_ranked(redis, STREAM, [(rank, rank.encode()) for rank in ranks], group=GROUP)
