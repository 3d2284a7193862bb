"""Who is there: replicas register themselves under a lease and vanish with it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Literal, cast

import structlog
from redis.asyncio import Redis

from shared import topology
from shared.errors import Rejected
from shared.messages import Message

log = structlog.get_logger()
LEASE_S = 6.0

ServerState = Literal["idle", "starting", "waiting_for_weights", "serving", "updating", "stopped"]


class Replica(Message):
    """One live replica of a service. For rollout servers the fields from `job_id` on are filled.

    `shards_url` is where it serves the weights that it has; of a trainer also. `trouble` is why
    there is no engine, and with `gave_up` none will be tried again.
    """

    service: Literal["rollout", "reward", "evaluator", "trainer"]
    name: str
    url: str
    pid: int
    job_id: str | None = None
    state: ServerState = "idle"
    engine: str = ""
    policy_version: int | None = None
    shards_url: str = ""
    paused: bool = False
    trouble: str = ""
    gave_up: bool = False


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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LEASE_S / 4)
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
