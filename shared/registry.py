"""Who is there: replicas register themselves under a lease and vanish with it."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, cast

import structlog
from redis.asyncio import Redis

from shared import topology
from shared.errors import Rejected
from shared.messages import Message
from shared.tasks import wait_for_event

log = structlog.get_logger()
LEASE_S = 6.0

ServerState = Literal["idle", "starting", "waiting_for_weights", "serving", "updating", "stopped"]


class Replica(Message):
    """One live replica of a service. Example: rollout 'rollout-0' serves version 17."""

    service: Literal["rollout", "reward", "evaluator", "trainer"]
    """What it does."""
    name: str
    """The replica's name, of which there is one at a time."""
    url: str
    """Base address of its REST."""
    pid: int
    """Process id on its own host."""
    job_id: str | None = None
    """The job that it works for; null: none."""
    state: ServerState = "idle"
    """Only rollout servers have states other than `idle` and `serving`."""
    engine: str = ""
    """`embedded` or `sglang` of a rollout server with a job; otherwise empty."""
    policy_version: int | None = None
    """The version that a rollout server serves, or the trainer's newest; null: none."""
    shards_url: str = ""
    """Where a rollout server or the trainer gives out the weights it has; otherwise empty."""
    paused: bool = False
    """Whether a rollout server was asked to stop decoding."""
    trouble: str = ""
    """Why a rollout server has no engine; empty where that is as it should be."""
    gave_up: bool = False
    """Whether it failed so often that no engine will be started for this job again."""


async def register(redis: Redis, record: Replica) -> None:
    """Write the record with a fresh lease."""
    key = topology.replica(record.service, record.name)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(key, record.pack(), px=int(LEASE_S * 1000))
        pipe.sadd(topology.REPLICAS, key)
        await pipe.execute()


async def unregister(redis: Redis, service: str, name: str) -> None:
    key = topology.replica(service, name)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(key)
        pipe.srem(topology.REPLICAS, key)
        await pipe.execute()


async def keep_registered(
    redis: Redis, describe: Callable[[], Replica], stop: asyncio.Event
) -> None:
    """Renew the lease (and the record) until `stop`, then leave."""
    record = describe()
    while not stop.is_set():
        record = describe()
        await register(redis, record)
        await wait_for_event(stop, LEASE_S / 4)
    await unregister(redis, record.service, record.name)


async def live_replicas(redis: Redis, service: str) -> list[Replica]:
    """Registered replicas of one service, sorted by name; expired ones are forgotten."""
    keys = sorted(cast(set[bytes], await cast(Any, redis.smembers(topology.REPLICAS))))
    if not keys:
        return []
    bodies = cast(list[bytes | None], await redis.mget(keys))
    expired = [key for key, body in zip(keys, bodies, strict=True) if body is None]
    if expired:
        await cast(Any, redis.srem(topology.REPLICAS, *expired))
    records = [_read(key, body) for key, body in zip(keys, bodies, strict=True) if body is not None]
    return [record for record in records if record is not None and record.service == service]


def _read(key: bytes, body: bytes) -> Replica | None:
    """None for what another release, say, wrote: one such record must not stop who looks."""
    try:
        return Replica.unpack(body)
    except Rejected as err:
        log.warning("replica_unreadable", key=key.decode(errors="replace"), error=str(err))
        return None
