"""Which job is on: read at the start, and again whenever the trainer announces a change."""

import asyncio
from typing import cast

from redis.asyncio import Redis

from shared import topology
from shared.job import Job
from shared.messages import JobAnnounced, ProfileAnnounced
from shared.streams import read_from
from shared.telemetry import bind_process

CHECK_S = 1.0  # the key is read again this often, in case the news went by


class CurrentJob:
    """The job that was announced last, active or not."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.announced: JobAnnounced | None = None

    @property
    def active_id(self) -> str | None:
        one = self.announced
        return one.job_id if one is not None and one.state == "active" else None

    @property
    def profile(self) -> ProfileAnnounced | None:
        """Of the active job, while one is taken."""
        one = self.announced
        return one.profile if one is not None and one.state == "active" else None

    @property
    def job(self) -> Job | None:
        return None if self.announced is None else Job.model_validate(self.announced.job)

    async def refresh(self) -> None:
        """Read the key. A broker that lost its data knows no job; then the last one stays."""
        body = cast(bytes | None, await self._redis.get(topology.JOB_CURRENT))
        if body is not None:
            self.announced = JobAnnounced.unpack(body)
            bind_process(job_id=self.active_id)

    async def follow(self, stop: asyncio.Event, changed: asyncio.Event) -> None:
        """Keep up until `stop`; `changed` is set whenever another job is active, or none."""
        last_id = b"$"
        while not stop.is_set():
            before = self.active_id
            await self.refresh()
            if self.active_id != before:
                changed.set()
            news = await read_from(self._redis, topology.JOB_CHANGES, last_id, block_s=CHECK_S)
            last_id = news[-1][0] if news else last_id
