"""What one consumer holds under lease: reading, renewing, settling.

Between reading a message and settling it (ack, bury, hand back) one task renews the leases of all
that is held. A lease given up early is aged in the broker, so that it runs out when the message
should come again: neither retries nor take-over need a clock of ours.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import structlog
from redis.exceptions import RedisError, ResponseError

from shared import topology
from shared.dead_letters import letter_fields
from shared.errors import Fatal, NotYet, Rejected, Retryable
from shared.tasks import end
from shared.telemetry import counter

if TYPE_CHECKING:
    from shared.streams import Consumer

log = structlog.get_logger()
Handler = Callable[[bytes], Awaitable[None]]

_IDS_PER_COMMAND = 500
_GOODBYE_S = 2.0  # a closing session may talk to the broker for so long


@dataclass(frozen=True, slots=True)
class Delivery:
    entry_id: bytes
    body: bytes
    times_delivered: int


class Session:
    """What one consumer holds right now."""

    def __init__(self, consumer: "Consumer") -> None:
        self._consumer = consumer
        self._redis = consumer.redis
        self._held: dict[bytes, int] = {}  # entry id -> times delivered
        self._retries: dict[bytes, tuple[int, int]] = {}  # all of them, those that may bury
        self._to_ack: list[bytes] = []
        self._acking = asyncio.Lock()
        # A lease that is renewed just after it was given up would run for its whole length.
        self._leasing = asyncio.Lock()
        self._room = asyncio.Event()
        self._reading: asyncio.Task[list[Delivery]] | None = None
        self._own_from: bytes | None = b"0"  # where our unacked messages of an earlier life go on
        self._claim_from = b"0-0"
        self._claim_at_s = 0.0
        self._counts = counter(
            "stream_messages_total", "Messages by what became of them.", ("stream", "outcome")
        )
        self._label = consumer.stream.rsplit(":", 1)[-1]

    @property
    def held_ids(self) -> set[bytes]:
        """Entries that are read and neither acked, buried nor given up."""
        return set(self._held)

    async def deliveries(
        self, stop: asyncio.Event, *, max_unacked: int = 256
    ) -> AsyncIterator[Delivery]:
        """Messages as they come: ours of an earlier life, abandoned, new; `max_unacked` at once.

        Ends soon after `stop`. What was read and not yielded by then is handed back on leaving.
        """
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                free = max_unacked - len(self._held)
                if free <= 0:
                    await self._wait_for_room(stopped)
                    continue
                for delivery in await self._poll(free, stopped):
                    if stop.is_set():
                        return
                    yield delivery
        finally:
            await end(stopped)

    async def process(self, delivery: Delivery, handler: Handler) -> None:
        """Run the handler and settle the message. Raises only what ends the process."""
        try:
            await handler(delivery.body)
        except Rejected as err:
            await self.bury(delivery, str(err))
        except (Retryable, RedisError) as err:
            await self._retry(delivery, err)
        except Fatal:
            await self._release(delivery, delivery.times_delivered, self._consumer.retry_s)
            raise
        except asyncio.CancelledError:
            if cast(Any, asyncio.current_task()).cancelling():
                raise
            await self._fail(delivery, RuntimeError("something it waited for was cancelled"))
        except Exception as err:  # noqa: BLE001  one message's failure must not touch the others
            await self._fail(delivery, err)
        else:
            await self.ack([delivery.entry_id])

    async def ack(self, ids: Iterable[bytes]) -> None:
        """Finish messages for good. Concurrent calls share one round trip."""
        self._to_ack.extend(ids)
        async with self._acking:
            batch, self._to_ack = self._to_ack, []
            if not batch:
                return
            try:
                async with self._redis.pipeline(transaction=True) as pipe:
                    self._queue_removal(pipe, batch)
                    await pipe.execute()
            except BaseException:
                self._to_ack[:0] = batch  # whoever waits for the lock tries again
                raise
        self._counts.labels(self._label, "handled").inc(len(batch))
        self._forget(batch)

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """Move the message to the dead stream: it will not come again."""
        c = self._consumer
        letter = letter_fields(
            delivery.entry_id,
            delivery.body,
            reason=reason,
            consumer=c.name,
            times_delivered=delivery.times_delivered,
            max_body_bytes=c.max_body_bytes,
        )
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(topology.dead(c.stream), cast(Any, letter))
            self._queue_removal(pipe, [delivery.entry_id])
            await pipe.execute()
        self._counts.labels(self._label, "buried").inc()
        log.error("message_buried", reason=reason, **self._about(delivery))
        self._forget([delivery.entry_id])

    async def hand_back(self, ids: Iterable[bytes]) -> None:
        """Give messages up, uncounted: any consumer of the group may take them at once."""
        held = [(entry_id, self._held[entry_id]) for entry_id in ids if entry_id in self._held]
        for start in range(0, len(held), _IDS_PER_COMMAND):
            chunk = held[start : start + _IDS_PER_COMMAND]
            async with self._leasing, self._redis.pipeline(transaction=False) as pipe:
                for entry_id, times_delivered in chunk:
                    self._queue_release(pipe, entry_id, times_delivered - 1, delay_s=0.0)
                await pipe.execute()
                self._forget(entry_id for entry_id, _ in chunk)

    async def ensure_group(self) -> None:
        c = self._consumer
        try:
            await self._redis.xgroup_create(c.stream, c.group, id="0", mkstream=True)
        except ResponseError as err:
            if "BUSYGROUP" not in str(err):
                raise

    async def renew_leases(self) -> None:
        """Reset the idle clock of what is held; JUSTID leaves the delivery count alone."""
        c = self._consumer
        while True:
            await asyncio.sleep(c.lease_s / 3)
            async with self._leasing:
                ids = list(self._held)
                try:
                    for start in range(0, len(ids), _IDS_PER_COMMAND):
                        chunk: Any = ids[start : start + _IDS_PER_COMMAND]
                        await self._redis.xclaim(c.stream, c.group, c.name, 0, chunk, justid=True)
                except RedisError as err:
                    held = len(ids)
                    log.warning("leases_not_renewed", stream=c.stream, held=held, error=str(err))

    async def close(self) -> None:
        """Hand back what is held, as far as the broker answers soon."""
        if self._reading is not None:
            await end(self._reading)
        if not self._held:
            return
        handing = asyncio.create_task(self.hand_back(list(self._held)))
        await asyncio.wait({handing}, timeout=_GOODBYE_S)
        await end(handing)
        if self._held:
            log.warning("leases_left", stream=self._consumer.stream, held=len(self._held))

    async def _wait_for_room(self, stopped: asyncio.Task[Any]) -> None:
        self._room.clear()
        room = asyncio.create_task(self._room.wait())
        try:
            await asyncio.wait({room, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(room)

    async def _poll(self, limit: int, stopped: asyncio.Task[Any]) -> list[Delivery]:
        """Read in a task of its own: a cancelled read can lose its answer or ignore the cancel."""
        self._reading = asyncio.create_task(self._read(limit))
        await asyncio.wait({self._reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not self._reading.done():
            await asyncio.wait({self._reading}, timeout=self._consumer.block_s + 0.5)
        if not self._reading.done():
            await end(self._reading)
            return []
        return self._reading.result()

    async def _read(self, limit: int) -> list[Delivery]:
        try:
            if self._own_from is not None:
                return await self._own_unacked(limit)
            if time.monotonic() >= self._claim_at_s and (taken := await self._abandoned(limit)):
                return taken
            return await self._new(limit)
        except ResponseError as err:
            if not str(err).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            await self._start_over(err)
            return []

    async def _start_over(self, err: ResponseError) -> None:
        """The broker lost its data: have a group again, and tell who can feed the work again."""
        log.error("group_lost", stream=self._consumer.stream, error=str(err))
        self._counts.labels(self._label, "group_lost").inc()
        await self.ensure_group()
        self._own_from, self._claim_from = None, b"0-0"
        if self._consumer.on_group_lost is not None:
            self._consumer.on_group_lost()

    async def _own_unacked(self, limit: int) -> list[Delivery]:
        """What an earlier process of our name held when it died; no need to wait for its leases."""
        c = self._consumer
        start = cast(bytes, self._own_from)
        reply: Any = await self._redis.xreadgroup(c.group, c.name, {c.stream: start}, count=limit)
        entries = entries_of(reply)
        self._own_from = entries[-1][0] if entries else None
        return await self._admit_again(entries)

    async def _abandoned(self, limit: int) -> list[Delivery]:
        """Messages whose lease ran out. The scan goes on where the last one ended."""
        c = self._consumer
        reply: Any = await self._redis.xautoclaim(
            c.stream, c.group, c.name, int(c.lease_s * 1000), self._claim_from, count=limit
        )
        self._claim_from = reply[0]
        if self._claim_from == b"0-0":
            self._claim_at_s = time.monotonic() + min(c.retry_s, c.lease_s / 3)
        if deleted := reply[2]:
            log.error("unacked_messages_were_deleted", stream=c.stream, entry_ids=deleted)
        return await self._admit_again(reply[1])

    async def _new(self, limit: int) -> list[Delivery]:
        c = self._consumer
        began_s = time.monotonic()
        block_s = max(0.001, min(c.block_s, self._claim_at_s - began_s))
        reply: Any = await self._redis.xreadgroup(
            c.group, c.name, {c.stream: ">"}, count=limit, block=max(1, int(block_s * 1000))
        )
        if time.monotonic() - began_s > block_s + 2.0:  # the broker was away: others renew first
            self._claim_at_s = time.monotonic() + c.lease_s / 3
        return await self._admit([(entry_id, fields, 1) for entry_id, fields in entries_of(reply)])

    async def _admit_again(self, entries: list[tuple[bytes, Any]]) -> list[Delivery]:
        c = self._consumer
        entries = [(entry_id, fields) for entry_id, fields in entries if entry_id not in self._held]
        if not entries:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry_id, _ in entries:
                pipe.xpending_range(c.stream, c.group, entry_id, entry_id, 1)
            pending = await pipe.execute()
        return await self._admit(
            [
                (entry_id, fields, int(rows[0]["times_delivered"]))
                for (entry_id, fields), rows in zip(entries, pending, strict=True)
                if rows
            ]
        )

    async def _admit(self, entries: Iterable[tuple[bytes, Any, int]]) -> list[Delivery]:
        """Hold what can be handled; bury what cannot."""
        c = self._consumer
        admitted = []
        for entry_id, fields, times_delivered in entries:
            body = (fields or {}).get(b"body")
            delivery = Delivery(entry_id, body or b"", times_delivered)
            self._held[entry_id] = times_delivered
            if body is None:
                await self.bury(delivery, "the entry has no body")
            elif len(body) > c.max_body_bytes:
                await self.bury(delivery, f"{len(body)} bytes exceed {c.max_body_bytes}")
            elif times_delivered > c.max_deliveries:
                await self.bury(delivery, f"its worker died {times_delivered - 1} times")
            else:
                admitted.append(delivery)
        return admitted

    async def _retry(self, delivery: Delivery, err: Exception) -> None:
        """Not the message's fault: it comes again, later each time, without being counted."""
        c = self._consumer
        num_retries, num_counted = self._retries.get(delivery.entry_id, (0, 0))
        num_retries += 1
        num_counted += not isinstance(err, NotYet)
        if num_counted > c.max_retries:
            await self.bury(delivery, f"retried {c.max_retries} times: {err}")
            return
        delay_s = self._delay_s(num_retries)
        log.info("message_retried", error=str(err), delay_s=delay_s, **self._about(delivery))
        await self._release(delivery, delivery.times_delivered - 1, delay_s)
        self._retries[delivery.entry_id] = num_retries, num_counted
        self._counts.labels(self._label, "retried").inc()

    async def _fail(self, delivery: Delivery, err: Exception) -> None:
        c = self._consumer
        log.error("message_failed", exc_info=err, **self._about(delivery))
        self._counts.labels(self._label, "failed").inc()
        if delivery.times_delivered >= c.max_deliveries:
            reason = f"{type(err).__name__}: {err} (delivery {delivery.times_delivered})"
            await self.bury(delivery, reason)
        else:
            delay_s = self._delay_s(delivery.times_delivered)
            await self._release(delivery, delivery.times_delivered, delay_s)

    async def _release(self, delivery: Delivery, count: int, delay_s: float) -> None:
        async with self._leasing, self._redis.pipeline(transaction=False) as pipe:
            self._queue_release(pipe, delivery.entry_id, count, delay_s)
            await pipe.execute()
            self._forget([delivery.entry_id])

    def _delay_s(self, attempt: int) -> float:
        c = self._consumer
        longest_s = min(10 * c.retry_s, c.lease_s)
        delay_s: float = c.retry_s * 2 ** min(attempt - 1, 10)
        return min(delay_s, longest_s) * random.uniform(0.5, 1.0)

    def _queue_release(self, pipe: Any, entry_id: bytes, count: int, delay_s: float) -> None:
        """Age the lease so that it runs out in `delay_s`."""
        c = self._consumer
        idle_ms = max(0, int((c.lease_s - delay_s) * 1000))
        pipe.xclaim(
            c.stream, c.group, c.name, 0, [entry_id], idle=idle_ms, retrycount=count, justid=True
        )

    def _queue_removal(self, pipe: Any, ids: list[bytes]) -> None:
        c = self._consumer
        pipe.xack(c.stream, c.group, *ids)
        pipe.xdel(c.stream, *ids)

    def _forget(self, ids: Iterable[bytes]) -> None:
        for entry_id in ids:
            self._held.pop(entry_id, None)
            self._retries.pop(entry_id, None)
        self._room.set()

    def _about(self, delivery: Delivery) -> dict[str, Any]:
        return {
            "stream": self._consumer.stream,
            "entry_id": delivery.entry_id.decode(),
            "times_delivered": delivery.times_delivered,
        }


def entries_of(reply: Any) -> list[tuple[bytes, Any]]:
    """The entries of the one stream that was read."""
    return cast(list[tuple[bytes, Any]], reply[0][1]) if reply else []
