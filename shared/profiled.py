"""A service's part in a profile: record while the job asks for it, and send what was recorded.

    JOB_CURRENT.profile ──> recorder on ──every second──> spans stream ──last one──> recorder off

The announcement says so; nothing is asked of the broker for it.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from redis.asyncio import Redis

from shared import topology
from shared.current_job import CurrentJob
from shared.messages import ProfileAnnounced, SpanBatch
from shared.spans import ClockOffset, Span, boot_id, clock_offset, recorder
from shared.streams import publish
from shared.tasks import wait_for_event

log = structlog.get_logger()
LOOK_S = 0.1
SEND_S = 1.0
_BATCH = 5000  # spans of one message

AskChild = Callable[[int], Awaitable[dict[str, Any]]]
"""Has a child record so many spans, or none any more; its `spans` since the last call, `dropped`
and `pid`."""


class Profiled:
    def __init__(
        self,
        redis: Redis,
        current: CurrentJob,
        *,
        service: str,
        replica: str,
        child: AskChild | None = None,
    ) -> None:
        self._redis = redis
        self._current = current
        self._service = service
        self._replica = replica
        self._child = child

    async def run(self, stop: asyncio.Event) -> None:
        """Take part in one profile after the other until `stop`."""
        while not stop.is_set():
            if (asked := self._current.profile) is not None:
                await self._record(asked, stop)
            await wait_for_event(stop, LOOK_S)

    async def _record(self, asked: ProfileAnnounced, stop: asyncio.Event) -> None:
        recorder().start(asked.max_spans)
        clock = await clock_offset(self._redis)
        log.info("profile_begins", profile_id=asked.profile_id, job_id=asked.job_id)
        try:
            while not stop.is_set() and self._current.profile == asked:
                await self._send(asked, clock, child_spans=asked.max_spans)
                await self._until_over(asked, stop)
        finally:
            recorder().stop()
        await self._send(asked, await clock_offset(self._redis), child_spans=0)
        log.info("profile_ends", profile_id=asked.profile_id, job_id=asked.job_id)

    async def _until_over(self, asked: ProfileAnnounced, stop: asyncio.Event) -> None:
        for _ in range(round(SEND_S / LOOK_S)):
            if self._current.profile != asked or await wait_for_event(stop, LOOK_S):
                return

    async def _send(self, asked: ProfileAnnounced, clock: ClockOffset, *, child_spans: int) -> None:
        """The child's first: whoever has our last batch has all."""
        is_last = child_spans == 0
        if self._child is not None and (told := await self._child(child_spans)):
            spans = [Span(*one) for one in told["spans"]]
            process = f"{self._replica} engine"
            await self._publish(
                asked, clock, spans, process=process, dropped=told["dropped"], pid=told["pid"]
            )
        spans, dropped = recorder().drain()
        await self._publish(
            asked, clock, spans, process=self._replica, dropped=dropped, is_last=is_last
        )

    async def _publish(
        self,
        asked: ProfileAnnounced,
        clock: ClockOffset,
        spans: Sequence[Span],
        *,
        process: str,
        dropped: int,
        pid: int | None = None,
        is_last: bool = False,
    ) -> None:
        for first in range(0, max(1, len(spans)), _BATCH):
            batch = SpanBatch(
                profile_id=asked.profile_id,
                service=self._service,
                replica=self._replica,
                process=process,
                host=socket.gethostname(),
                pid=os.getpid() if pid is None else pid,
                boot_id=boot_id(),
                clock_offset_ns=clock.offset_ns,
                clock_uncertainty_ns=clock.uncertainty_ns,
                num_dropped=dropped,
                is_last=is_last and first + _BATCH >= len(spans),
                spans=[list(one) for one in spans[first : first + _BATCH]],
            )
            await publish(self._redis, topology.spans(asked.job_id), batch.pack())
