"""Looks after work that the broker lost or buried: a group may be slow, but never silently gone.

A message is published downstream before it is acked upstream. So whoever looks through the streams
in the order prompts, rollouts, groups finds every group that is still under way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgpack
import structlog
from redis.asyncio import Redis

from services.trainer.announcements import work_streams
from services.trainer.books import Books
from services.trainer.collector import Collector
from services.trainer.feeder import Feeder
from shared import topology
from shared.dead_letters import dead_letters
from shared.streams import backlog
from shared.tasks import wait_for_event
from shared.telemetry import gauge, note_backlog

log = structlog.get_logger()
INTERVAL_S = 1.0
MAX_TIMES_FED = 5
_PAGE = 50
_MAX_LETTERS = 1000

# Where a message of each stage carries its group.
_PATHS = {"prompts": (), "rollouts": ("prompt",), "groups": ("group", "prompt")}


class Watch:
    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        books: Books,
        feeder: Feeder,
        collector: Collector,
        quiet_s: float,
    ) -> None:
        self._redis = redis
        self._job_id = job_id
        self._books = books
        self._feeder = feeder
        self._collector = collector
        self._quiet_s = quiet_s
        self._audited_at_s = time.monotonic()
        self._num_dead = 0
        self._broker: str | None = None

    async def run(
        self, stop: asyncio.Event, *, announce_again: Callable[[], Awaitable[None]]
    ) -> None:
        """Until `stop`: notice a broker that was restarted, buried messages, and long silence."""
        while not stop.is_set():
            if await self._broker_forgot():
                await announce_again()
                await self.audit()
            await self._look()
            await wait_for_event(stop, INTERVAL_S)

    async def audit(self) -> int:
        """Ask again for open groups that are in no stream; how many there were."""
        async with self._feeder.quiet:  # what is drawn meanwhile would look lost
            under_way = await groups_under_way(self._redis, self._job_id)
            under_way |= self._collector.held_ids()
            entries = self._books.open_groups()
        await self._drop_buried()  # after the look: what is buried meanwhile is not lost
        under_way |= {one.group_id for one in entries} - self._open_ids()
        lost = [entry for entry in entries if entry.group_id not in under_way]
        hopeless = [entry for entry in lost if entry.times_fed >= MAX_TIMES_FED]
        if hopeless:
            await self._collector.drop(hopeless, reason="lost")
        again = [entry for entry in lost if entry.times_fed < MAX_TIMES_FED]
        if again:
            log.warning("groups_lost", number=len(again))
            await self._feeder.feed_again(again)
        await self._feeder.fill()
        self._audited_at_s = time.monotonic()
        return len(lost)

    async def backlogs(self) -> dict[str, int]:
        """Unfinished messages of each stage."""
        return {
            stage: await backlog(self._redis, stream, group)
            for stage, (stream, group) in work_streams(self._job_id).items()
        }

    def _open_ids(self) -> set[str]:
        return {entry.group_id for entry in self._books.open_groups()}

    async def _broker_forgot(self) -> bool:
        """Whether it is another process than last time, or lacks what it was told."""
        broker = str((await self._redis.info("server"))["run_id"])
        before, self._broker = self._broker, broker
        if before in (None, broker) and await self._redis.exists(topology.JOB_CURRENT):
            return False
        log.warning("broker_forgot", restarted=before != broker)
        return True

    async def _look(self) -> None:
        backlogs = await self.backlogs()
        for stage, number in backlogs.items():
            note_backlog(stage, number)
        quiet_since_s = max(self._collector.last_arrival_s, self._audited_at_s)
        quiet = time.monotonic() - quiet_since_s > self._quiet_s
        if quiet or await self._count_dead() != self._num_dead:
            await self.audit()

    async def _count_dead(self) -> int:
        streams = [topology.dead(stream) for stream, _ in work_streams(self._job_id).values()]
        number = sum([int(await self._redis.xlen(stream)) for stream in streams])
        gauge("trainer_dead_letters", "Messages of the job that nobody can handle.").set(number)
        return number

    async def _drop_buried(self) -> None:
        """A message that nobody can handle takes its group with it."""
        self._num_dead = await self._count_dead()
        if not self._num_dead:
            return
        open_groups = {entry.group_id: entry for entry in self._books.open_groups()}
        for stage, (stream, _) in work_streams(self._job_id).items():
            for letter in await dead_letters(self._redis, stream, limit=_MAX_LETTERS):
                entry = open_groups.pop(_group_id(stage, letter.body) or "", None)
                if entry is not None and entry.group_id not in self._collector.held_ids():
                    await self._collector.drop(
                        [entry], reason="buried", stage=stage, cause=letter.reason
                    )


async def groups_under_way(redis: Redis, job_id: str) -> set[str]:
    """Ids of all groups that some stage still has to finish."""
    found: set[str] = set()
    for stage, (stream, _) in work_streams(job_id).items():
        begin = "-"
        while page := cast(Any, await redis.xrange(stream, min=begin, count=_PAGE)):
            for entry_id, fields in page:
                if name := _group_id(stage, fields.get(b"body", b"")):
                    found.add(name)
                begin = f"({entry_id.decode()}"
    return found


def _group_id(stage: str, body: bytes) -> str | None:
    """The group that a message is about; None if it is unreadable."""
    try:
        at = msgpack.unpackb(body)
        for key in _PATHS[stage]:
            at = at[key]
        return str(at["group_id"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, RecursionError):
        return None
