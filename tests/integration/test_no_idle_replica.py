"""Two workers on one real stream of prompts, whose completions end when the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.worker import SampleWorker
from shared import topology
from shared.job import Job
from shared.streams import entries_of, publish
from shared.tokenizer import CheckpointTokenizer
from tests.integration.rollout_world import JOB_ID, TOKENIZER, eventually, job_document, make_prompt

LONG, SHORT = 40, 4  # tokens of a prompt


class Replica:
    """A rollout server without an engine: a group runs until it is finished by hand."""

    def __init__(self, redis: Redis, name: str, job: Job, *, num_peers: int) -> None:
        self.running: dict[int, asyncio.Event] = {}  # by seed, which is the draw
        self.finished: list[int] = []
        self.closing = asyncio.Event()
        spec = SimpleNamespace(
            records=False, context_length=64, arch=SimpleNamespace(vocab_size=320)
        )
        serving = SimpleNamespace(
            job=job,
            job_id=JOB_ID,
            closing=self.closing,
            policy_version=0,
            engine=SimpleNamespace(spec=spec),
            tokenizer=CheckpointTokenizer.load(TOKENIZER),
            sample=self._sample,
        )
        self.server: Any = SimpleNamespace(
            redis=redis,
            config=SimpleNamespace(
                name=name, drain_s=4.0, version_wait_s=1.0, group_deadline_s=60.0
            ),
            serving=serving,
            may_take=True,
            num_peers=num_peers,
            changed=asyncio.Event(),
            wait_version=_at_once,
        )

    async def _sample(self, request: GroupRequest, *, timeout_s: float) -> dict[int, Completion]:
        ended = self.running[request.seed] = asyncio.Event()
        await ended.wait()
        self.running.pop(request.seed, None)
        self.finished.append(request.seed)
        one = Completion(np.array([7], np.int32), -np.ones(1, np.float32), [(0, 1)], "stop")
        return dict.fromkeys(range(4), one)

    def finish(self, draw: int) -> None:
        self.running.pop(draw).set()


async def _at_once(*_: object) -> bool:
    return True


@contextlib.asynccontextmanager
async def working(*replicas: Replica) -> AsyncIterator[None]:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(SampleWorker(one.server).run(stop)) for one in replicas]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        stop.set()
        for one in replicas:
            for ended in one.running.values():
                ended.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)


def lengths() -> Iterator[int]:
    """One prompt in four is long."""
    while True:
        yield from (LONG, SHORT, SHORT, SHORT)


@pytest.fixture
def job() -> Job:
    """Two groups fill an engine; twenty may be open."""
    sampling = {"groups_per_step": 20, "samples_per_prompt": 4}
    engine = {"max_running_requests": 8}
    return Job.model_validate(job_document(TOKENIZER, sampling=sampling, rollout=engine))


async def test_no_replica_idles_while_prompts_wait(redis: Redis, job: Job) -> None:
    """One has drawn long groups that do not end; the other takes every prompt that is left, and at
    each moment both have what fills them, or no prompt waits."""
    slow, quick = (Replica(redis, name, job, num_peers=2) for name in ("slow", "quick"))
    for draw, length in zip(range(20), lengths(), strict=False):
        prompt = make_prompt(draw, prompt_token_ids=[9] * length)
        await publish(redis, topology.prompts(JOB_ID), prompt.pack())
    async with working(slow, quick):
        await until(lambda: len(slow.running) == len(quick.running) == 2)
        for left in range(15, -1, -1):
            quick.finish(min(quick.running))
            # One ended and one waits: it must begin, beside what runs.
            await until(lambda: len(quick.running) == 2, f"{left + 1} prompts wait")
            assert len(slow.running) == 2
        assert await waiting(redis) == 0
        assert len(quick.finished) == 16
        for replica in (quick, slow):
            for draw in list(replica.running):
                replica.finish(draw)
        await until(lambda: len(quick.finished) + len(slow.finished) == 20)
    reply = await redis.xread({topology.rollouts(JOB_ID): b"0"})
    assert len(entries_of(reply)) == 20


async def test_what_a_replica_leaves_is_taken_by_the_other(redis: Redis, job: Job) -> None:
    """One is held for an evaluation: it takes nothing more, and the other has all there is."""
    held, free = (Replica(redis, name, job, num_peers=2) for name in ("held", "free"))
    held.server.may_take = False
    for draw in range(6):
        await publish(redis, topology.prompts(JOB_ID), make_prompt(draw).pack())
    async with working(held, free):
        for done in range(6):
            await until(lambda done=done: len(free.running) == min(2, 6 - done))  # type: ignore[misc]
            free.finish(min(free.running))
            await until(lambda done=done: len(free.finished) == done + 1)  # type: ignore[misc]
        assert not held.running
        assert not held.finished


async def waiting(redis: Redis) -> int:
    """Prompts that nobody has taken."""
    (group,) = await redis.xinfo_groups(topology.prompts(JOB_ID))
    return int(group["lag"])


async def until(condition: Callable[[], bool], what: str = "the workers") -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds, what, 60.0)
