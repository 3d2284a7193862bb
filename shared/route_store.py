"""Routes of sampled groups at the broker: a key beside the group's message, named by its content.

The message says which key; whoever acks the message for good deletes the key. One that nobody
deletes (a sampler died before its message was out) expires.
"""

from collections.abc import Sequence
from typing import cast

import msgpack
import xxhash
from redis.asyncio import Redis

from shared import topology
from shared.errors import Rejected, TandemError
from shared.messages import StoredRoutes

KEEP_S = 24 * 3600
MAX_BYTES = 512 * 2**20  # of one value, the broker's own limit
_PAGE = 500


class RoutesLost(TandemError):
    """The key is gone: it expired, or the broker lost it."""


async def store_routes(
    redis: Redis, *, job_id: str, group_id: str, blobs: Sequence[bytes]
) -> StoredRoutes:
    """Keep one blob per rollout; the answer goes into the group's message."""
    body = cast(bytes, msgpack.packb(list(blobs)))
    if len(body) > MAX_BYTES:
        raise Rejected(f"{group_id}: routes of {len(body)} bytes exceed {MAX_BYTES}")
    stored = StoredRoutes(digest=xxhash.xxh3_128_hexdigest(body), num_bytes=len(body))
    await redis.set(topology.routes(job_id, group_id, stored.digest), body, ex=KEEP_S)
    return stored


async def load_routes(
    redis: Redis, stored: StoredRoutes, *, job_id: str, group_id: str, num_rollouts: int
) -> list[bytes]:
    """A blob per rollout. `RoutesLost`, or `Rejected` for one that is not what was stored."""
    key = topology.routes(job_id, group_id, stored.digest)
    body = cast(bytes | None, await redis.get(key))
    if body is None:
        raise RoutesLost(f"{group_id}: key {key} is gone")
    if xxhash.xxh3_128_hexdigest(body) != stored.digest or len(body) != stored.num_bytes:
        raise Rejected(
            f"{group_id}: {len(body)} bytes of routes with digest "
            f"{xxhash.xxh3_128_hexdigest(body)}; {stored.num_bytes} with {stored.digest} were told"
        )
    try:
        blobs = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException, RecursionError) as err:
        raise Rejected(f"{group_id}: routes are not msgpack ({err})") from err
    if not isinstance(blobs, list) or not all(isinstance(blob, bytes) for blob in blobs):
        raise Rejected(f"{group_id}: routes are no list of bytes")
    if len(blobs) != num_rollouts:
        raise Rejected(f"{group_id}: routes of {len(blobs)} rollouts, it has {num_rollouts}")
    return blobs


async def delete_routes(
    redis: Redis, stored: StoredRoutes | None, *, job_id: str, group_id: str
) -> None:
    """Nobody will ask for them again."""
    if stored is not None:
        await redis.unlink(topology.routes(job_id, group_id, stored.digest))


async def delete_all_routes(redis: Redis, job_id: str) -> int:
    """Those of an ended job, in pages; how many there were."""
    num = 0
    async for key in redis.scan_iter(match=topology.all_routes(job_id), count=_PAGE):
        num += int(await redis.unlink(key))
    return num
