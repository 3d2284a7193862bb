"""Worker processes are killed while they work; every message is still handled."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

from shared.local_stack import Program, running
from shared.streams import backlog, dead_letters, publish

ROOT = Path(__file__).parents[2]
STREAM, GROUP, DONE = "tandem:{job}:groups", "trainers", "done"
WORKER = textwrap.dedent("""
    import asyncio, sys
    from shared.process import die_with_parent
    from shared.redis import create_redis
    from shared.streams import Consumer

    async def main(url, name):
        redis = create_redis(url, process=name)

        async def handle(body):
            await asyncio.sleep(0.02)
            await redis.hincrby("done", body, 1)

        consumer = Consumer(redis, "tandem:{job}:groups", "trainers", name, lease_s=1.0)
        await consumer.run(handle, stop=asyncio.Event(), concurrency=4)

    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
""")


async def test_every_message_is_handled_though_workers_are_killed(redis, redis_url, tmp_path):
    workers = [
        Program(name, [sys.executable, "-c", WORKER, redis_url, name], cwd=ROOT)
        for name in ("w0", "w1")
    ]
    for i in range(400):
        await publish(redis, STREAM, b"%d" % i)
    killed: set[int] = set()
    async with running([workers], log_dir=tmp_path) as stack:
        for victim, enough in (("w0", 60), ("w1", 140), ("w0", 220)):
            await _until_done(redis, enough)
            await _kill(stack, victim, killed)
        async with asyncio.timeout(30):
            while await backlog(redis, STREAM, GROUP):  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.05)
            while stack.restarts != {"w0": 2, "w1": 1}:  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.05)
    handled = {int(key): int(times) for key, times in (await redis.hgetall(DONE)).items()}
    repeated = sum(times - 1 for times in handled.values())
    assert set(handled) == set(range(400))
    assert repeated <= 3 * 4  # at most what the victims had in hand
    assert await dead_letters(redis, STREAM) == []


async def _kill(stack, victim, killed):
    """A program that was killed before has no process until it is started again."""
    async with asyncio.timeout(20):
        while stack.pids[victim] in killed:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.02)
    killed.add(stack.pids[victim])
    os.kill(stack.pids[victim], signal.SIGKILL)


async def _until_done(redis, count):
    async with asyncio.timeout(20):
        while await redis.hlen(DONE) < count:  # noqa: ASYNC110  other processes
            await asyncio.sleep(0.02)
