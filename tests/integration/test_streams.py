"""Delivery, take-over and burial on a real broker."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from shared.errors import Fatal, NotYet, Rejected, Retryable
from shared.streams import (
    Consumer,
    announce,
    backlog,
    dead_letters,
    publish,
    read_from,
    requeue_dead,
)

STREAM = "tandem:{job}:prompts"
GROUP = "samplers"


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110  another process, no event
            await asyncio.sleep(0.02)


async def publish_each(redis, stream, bodies):
    for body in bodies:
        await publish(redis, stream, body)


def consumer(redis, name="w0", **settings):
    quick = {"lease_s": 0.4, "retry_s": 0.05, "block_s": 0.1}
    return Consumer(redis, STREAM, GROUP, name, **{**quick, **settings})


@asynccontextmanager
async def consuming(consumer, handler, **how):
    stop = asyncio.Event()
    task = asyncio.create_task(consumer.run(handler, stop=stop, **how))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def nothing_left(redis) -> bool:
    return await backlog(redis, STREAM, GROUP) == 0


async def test_every_message_is_handled_once(redis):
    seen = []

    async def handle(body):
        seen.append(int(body))

    await publish_each(redis, STREAM, [b"%d" % i for i in range(300)])
    assert await backlog(redis, STREAM, GROUP) == 300
    async with (
        consuming(consumer(redis, "a"), handle, concurrency=8),
        consuming(consumer(redis, "b"), handle, concurrency=8),
    ):
        await until(lambda: nothing_left(redis))
    assert sorted(seen) == list(range(300))
    assert await redis.xlen(STREAM) == 0


async def test_no_more_messages_are_held_than_concurrency_allows(redis):
    running, most = 0, 0

    async def handle(body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    await publish_each(redis, STREAM, [b"x"] * 30)
    async with consuming(consumer(redis), handle, concurrency=3):
        await until(lambda: nothing_left(redis))
    assert most == 3


async def test_dead_workers_message_is_taken_over(redis):
    await publish(redis, STREAM, b"x")
    await redis.xgroup_create(STREAM, GROUP, id="0")
    await redis.xreadgroup(GROUP, "dead", {STREAM: ">"})  # read, never acked: the worker is gone
    seen = []

    async def handle(body):
        seen.append(body)

    async with consuming(consumer(redis, "alive"), handle):
        await until(lambda: nothing_left(redis))
    assert seen == [b"x"]


async def test_lease_is_renewed_while_a_slow_handler_runs(redis):
    started = []

    async def slow(body):
        started.append(body)
        await asyncio.sleep(4.5)  # three leases long

    await publish(redis, STREAM, b"slow")
    async with (
        consuming(consumer(redis, "a", lease_s=1.5), slow),
        consuming(consumer(redis, "b", lease_s=1.5), slow),
    ):
        await until(lambda: nothing_left(redis))
    assert started == [b"slow"]


async def test_poison_is_buried_with_its_reason_and_others_pass(redis):
    calls, good = [], []

    async def handle(body):
        if body == b"poison":
            calls.append(body)
            raise ValueError("cannot digest")
        good.append(body)

    await publish_each(redis, STREAM, [b"a", b"poison", b"b"])
    async with consuming(consumer(redis, max_deliveries=3), handle, concurrency=2):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert len(calls) == 3
    assert good == [b"a", b"b"]
    assert letter.body == b"poison"
    assert letter.reason == "ValueError: cannot digest (delivery 3)"


async def test_message_that_kills_its_workers_is_buried(redis):
    await publish(redis, STREAM, b"killer")
    await redis.xgroup_create(STREAM, GROUP, id="0")
    (entry_id,) = [entry[0] for entry in await redis.xrange(STREAM)]
    await redis.xreadgroup(GROUP, "dead", {STREAM: ">"})
    await redis.xclaim(STREAM, GROUP, "dead", 0, [entry_id], retrycount=5)
    async with consuming(consumer(redis), _never):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert letter.reason == "its worker died 5 times"


async def test_rejected_is_buried_at_once(redis):
    calls = []

    async def handle(body):
        calls.append(body)
        raise Rejected("token id 999 beyond the vocabulary of 320")

    await publish(redis, STREAM, b"bad")
    async with consuming(consumer(redis), handle):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert calls == [b"bad"]
    assert letter.reason == "token id 999 beyond the vocabulary of 320"


async def test_retryable_comes_again_and_is_not_counted(redis):
    calls = []

    async def handle(body):
        calls.append(body)
        if len(calls) < 8:
            raise Retryable("engine not ready")

    await publish(redis, STREAM, b"x")
    async with consuming(consumer(redis, max_deliveries=2, retry_s=0.02), handle):
        await until(lambda: nothing_left(redis))
    assert len(calls) == 8
    assert await dead_letters(redis, STREAM) == []


async def test_endless_retries_are_bounded(redis):
    async def handle(body):
        raise Retryable("never ready")

    await publish(redis, STREAM, b"x")
    async with consuming(consumer(redis, max_retries=3, retry_s=0.02), handle):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert letter.reason == "retried 3 times: never ready"


async def test_a_lease_is_not_renewed_behind_the_back_of_a_retry(redis, monkeypatch):
    """The broker gets the renewal late: the message still comes again soon, not a lease later."""
    asked, sent, calls_s = asyncio.Event(), asyncio.Event(), []
    claim = redis.xclaim

    async def late_claim(*args, **named):
        asked.set()
        await asyncio.wait_for(sent.wait(), 60)
        return await claim(*args, **named)

    async def handle(body):
        calls_s.append(time.monotonic())
        if len(calls_s) == 1:
            await asyncio.wait_for(asked.wait(), 60)
            asyncio.get_running_loop().call_later(0.2, sent.set)
            calls_s[0] = time.monotonic()
            raise Retryable("busy")

    await publish(redis, STREAM, b"x")
    monkeypatch.setattr(redis, "xclaim", late_claim)
    async with consuming(consumer(redis, lease_s=8.0, retry_s=0.6), handle):
        await until(lambda: nothing_left(redis))
    assert calls_s[1] - calls_s[0] < 6.0


async def test_what_is_on_its_way_is_waited_for_beyond_the_retries(redis):
    calls = []

    async def handle(body):
        calls.append(body)
        if len(calls) < 8:
            raise NotYet("version 3 is being staged")

    await publish(redis, STREAM, b"x")
    with capture_logs() as logs:
        async with consuming(consumer(redis, max_retries=2, retry_s=0.02), handle):
            await until(lambda: nothing_left(redis))
    assert len(calls) == 8
    assert await dead_letters(redis, STREAM) == []
    delays_s = [line["delay_s"] for line in logs if line["event"] == "message_retried"]
    assert all(one <= 0.02 * 2**i for i, one in enumerate(delays_s))
    assert min(delays_s[4:]) >= 0.1  # half of the longest, 10 * retry_s


async def test_fatal_ends_the_consumer_and_counts_against_its_message_only(redis):
    async def handle(body):
        if body == b"fatal":
            raise Fatal("engine died")
        await asyncio.sleep(30)

    await publish_each(redis, STREAM, [b"slow", b"fatal"])
    with pytest.raises(Fatal, match="engine died"):
        await asyncio.wait_for(
            consumer(redis).run(handle, stop=asyncio.Event(), concurrency=2), timeout=25
        )
    pending = await redis.xpending_range(STREAM, GROUP, "-", "+", 10)
    assert [row["times_delivered"] for row in pending] == [0, 1]


async def test_handler_whose_own_wait_is_cancelled_counts_as_failed(redis):
    async def handle(body):
        abandoned = asyncio.get_running_loop().create_future()
        abandoned.cancel()
        await abandoned

    await publish(redis, STREAM, b"x")
    async with consuming(consumer(redis, max_deliveries=2), handle):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert "was cancelled" in letter.reason


def test_block_time_beyond_the_clients_patience_is_refused():
    with pytest.raises(ValueError, match=r"block_s 30 exceeds 5"):
        Consumer(None, STREAM, GROUP, "w", block_s=30)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({b"other": b"x"}, "the entry has no body"),
        ({b"body": b"x" * 2000}, "2000 bytes exceed 1500"),
    ],
)
async def test_unfit_entry_is_buried_unseen(redis, fields, reason):
    await redis.xadd(STREAM, fields)
    async with consuming(consumer(redis, max_body_bytes=1500), _never):
        await until(lambda: nothing_left(redis))
    (letter,) = await dead_letters(redis, STREAM)
    assert letter.reason == reason
    assert await requeue_dead(redis, STREAM) == (1 if letter.body_bytes == 0 else 0)


async def test_stop_is_prompt_and_hands_unfinished_work_back(redis):
    began = asyncio.Event()

    async def endless(body):
        began.set()
        await asyncio.sleep(60)

    await publish_each(redis, STREAM, [b"a", b"b"])
    stop = asyncio.Event()
    slow_lease = consumer(redis, "a", lease_s=60.0)
    task = asyncio.create_task(slow_lease.run(endless, stop=stop, drain_s=0.2))
    await asyncio.wait_for(began.wait(), 60)
    stop.set()
    await asyncio.wait_for(task, 30)

    seen = []

    async def handle(body):
        seen.append(body)

    async with consuming(consumer(redis, "b", lease_s=60.0), handle):
        await until(lambda: nothing_left(redis), within_s=30)
    assert sorted(seen) == [b"a", b"b"]


async def test_idle_consumer_stops_within_its_block_time(redis):
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    task = asyncio.create_task(consumer(redis, block_s=0.5).run(_never, stop=stop))
    await asyncio.sleep(0.1)
    began = loop.time()
    stop.set()
    await task
    assert loop.time() - began < 5.0  # ten times that


async def test_manual_acks_keep_their_leases_without_reading(redis):
    stop = asyncio.Event()
    await publish_each(redis, STREAM, [b"a", b"b"])
    async with consumer(redis, "trainer", lease_s=1.5).session() as session:
        reading = session.deliveries(stop, max_unacked=2)
        held = [await anext(reading), await anext(reading)]
        async with consuming(consumer(redis, "other", lease_s=1.5), _never):
            await asyncio.sleep(4.5)  # three leases long
        await session.ack(delivery.entry_id for delivery in held)
        assert await nothing_left(redis)


async def test_unacked_messages_come_first_after_a_restart(redis):
    stop = asyncio.Event()
    await publish_each(redis, STREAM, [b"a", b"b"])
    await redis.xgroup_create(STREAM, GROUP, id="0")
    await redis.xreadgroup(GROUP, "trainer", {STREAM: ">"})  # an earlier life, killed
    await publish(redis, STREAM, b"c")
    async with consumer(redis, "trainer", lease_s=60.0).session() as session:
        reading = session.deliveries(stop)
        bodies = [(await asyncio.wait_for(anext(reading), 60)).body for _ in range(3)]
    assert bodies == [b"a", b"b", b"c"]


async def test_dead_letters_can_be_requeued(redis):
    async def reject(body):
        raise Rejected("not today")

    await publish_each(redis, STREAM, [b"a", b"b"])
    async with consuming(consumer(redis), reject):
        await until(lambda: nothing_left(redis))
    first, _ = await dead_letters(redis, STREAM)
    assert await requeue_dead(redis, STREAM, [first.dead_id]) == 1
    assert await requeue_dead(redis, STREAM) == 1
    assert await dead_letters(redis, STREAM) == []
    assert await backlog(redis, STREAM, GROUP) == 2


async def test_news_reach_every_reader_and_late_joiners(redis):
    await announce(redis, "news", b"v1", current_key="news:current")
    await announce(redis, "news", b"v2", current_key="news:current")
    first, second = await read_from(redis, "news", b"0")
    assert (first[1], second[1]) == (b"v1", b"v2")
    assert await read_from(redis, "news", first[0]) == [second]
    assert await read_from(redis, "news", second[0], block_s=0.05) == []
    assert await redis.get("news:current") == b"v2"


async def test_lost_group_is_created_again(redis):
    seen = []

    async def handle(body):
        seen.append(body)

    async with consuming(consumer(redis), handle):
        await publish(redis, STREAM, b"a")
        await until(lambda: nothing_left(redis))
        await redis.flushall()
        await publish(redis, STREAM, b"b")
        await until(lambda: nothing_left(redis))
    assert seen == [b"a", b"b"]


async def _never(body: bytes) -> None:
    raise AssertionError(f"must not be handled: {body!r}")
