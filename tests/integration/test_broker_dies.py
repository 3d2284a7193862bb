"""Consumers and publishers while the broker dies, stays away, or comes back empty."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError as BrokerAway

from shared.redis import broker_trouble, create_redis
from shared.streams import Consumer, backlog, publish
from tests.integration.own_broker import running_broker

STREAM = "tandem:{job}:rollouts"
GROUP = "graders"


@pytest_asyncio.fixture
async def own_broker(tmp_path, free_port):
    async with running_broker(tmp_path / "data", free_port) as own:
        yield own


@pytest_asyncio.fixture
async def client(own_broker):
    client = create_redis(own_broker.url, process="test", patience_s=20)
    yield client
    await client.aclose()


@asynccontextmanager
async def consuming(redis, handler, on_group_lost=None, **how):
    stop = asyncio.Event()
    settings = {"lease_s": 1.0, "retry_s": 0.1, "block_s": 0.2, "on_group_lost": on_group_lost}
    quick = Consumer(redis, STREAM, GROUP, "w", **settings)
    task = asyncio.create_task(quick.run(handler, stop=stop, **how))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def until(condition, within_s=60.0):
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110  another process, no event
            await asyncio.sleep(0.02)


async def nothing_left(redis):
    return await backlog(redis, STREAM, GROUP) == 0


async def test_restarted_broker_loses_no_message(own_broker, client):
    seen = set()

    async def handle(body):
        await asyncio.sleep(0.005)
        seen.add(int(body))

    async def feed():
        for start in range(0, 300, 10):
            for i in range(start, start + 10):
                await publish(client, STREAM, b"%d" % i)
            await asyncio.sleep(0.02)

    async with consuming(client, handle, concurrency=4):
        feeding = asyncio.create_task(feed())
        await until(lambda: _at_least(seen, 50))
        own_broker.kill()
        await own_broker.start()
        await feeding
        await until(lambda: nothing_left(client))
    assert seen == set(range(300))


async def test_absent_broker_is_waited_for_and_named(own_broker, client):
    seen = []

    async def handle(body):
        seen.append(body)

    async with consuming(client, handle):
        await publish(client, STREAM, b"before")
        await until(lambda: _at_least(seen, 1))
        assert broker_trouble(client) is None
        own_broker.kill()
        publishing = asyncio.create_task(publish(client, STREAM, b"during"))
        await asyncio.sleep(1.5)
        assert broker_trouble(client).startswith("broker unreachable for ")
        await own_broker.start()
        await publishing
        await until(lambda: _at_least(seen, 2))
        assert broker_trouble(client) is None
    assert seen == [b"before", b"during"]


async def test_broker_that_comes_back_empty_gets_its_group_again(own_broker, client):
    seen = []

    async def handle(body):
        seen.append(body)

    lost = []
    async with consuming(client, handle, on_group_lost=lambda: lost.append(True)):
        await publish(client, STREAM, b"old")
        await until(lambda: _at_least(seen, 1))
        own_broker.kill()
        shutil.rmtree(own_broker.data_dir)
        await own_broker.start()
        await publish(client, STREAM, b"new")
        await until(lambda: nothing_left(client))
    assert seen == [b"old", b"new"]
    assert lost == [True]


async def test_held_messages_survive_the_brokers_restart(own_broker, client):
    for body in (b"a", b"b"):
        await publish(client, STREAM, body)
    stop = asyncio.Event()
    trainer = Consumer(client, STREAM, GROUP, "trainer", lease_s=1.0, block_s=0.2)
    async with trainer.session() as session:
        reading = session.deliveries(stop)
        held = [await anext(reading), await anext(reading)]
        own_broker.kill()
        await own_broker.start()
        await session.ack(delivery.entry_id for delivery in held)
        assert await nothing_left(client)


async def test_broker_that_stays_away_ends_the_consumer(own_broker):
    hasty = create_redis(own_broker.url, process="hasty", patience_s=0.5)

    async def handle(body):
        raise AssertionError("nothing to handle")

    consumer = Consumer(hasty, STREAM, GROUP, "w", block_s=0.1)
    running = asyncio.create_task(consumer.run(handle, stop=asyncio.Event()))
    await until(lambda: hasty.exists(STREAM))
    own_broker.kill()
    with pytest.raises(BrokerAway):
        await asyncio.wait_for(running, 60)
    await hasty.aclose()


async def test_stop_is_prompt_while_the_broker_is_away(own_broker, client):
    async def handle(body):
        raise AssertionError("nothing to handle")

    loop = asyncio.get_running_loop()
    async with consuming(client, handle):
        await until(lambda: client.exists(STREAM))
        own_broker.kill()
        await asyncio.sleep(0.5)
        began = loop.time()
    assert loop.time() - began < 15  # of the 20 that the client waits for a broker


async def _at_least(seen, count):
    return len(seen) >= count
