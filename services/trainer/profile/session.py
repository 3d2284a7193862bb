"""Taking a profile of the job in progress.

    asked ─> next step begins: all record ─> one step of lead-in ─> the steps asked for ─> collect
             (announcement, ranks, this process)     (what runs already is not seen)     write files

Nothing is recorded before and after. `runs/JOB/profiles/ID/` gets trace.json and waits.json.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import structlog
from redis.asyncio import Redis

from services.trainer.keeper import RankKeeper
from services.trainer.profile.timeline import Process, Timeline, aligned, chrome_trace
from services.trainer.profile.waiting import most_waited_for, sentences, waits_of
from shared import topology
from shared.errors import Rejected, TandemError
from shared.messages import ProfileAnnounced, SpanBatch
from shared.registry import live_replicas
from shared.spans import MAX_SPANS, ClockOffset, Span, boot_id, clock_offset, recorder
from shared.streams import read_from

log = structlog.get_logger()
PROFILES = "profiles"
TRACE_FILE = "trace.json"
WAITS_FILE = "waits.json"
COLLECT_S = 10.0
State = Literal["asked", "recording", "done", "failed"]
Announce = Callable[[], Awaitable[None]]
SERVICES: tuple[Any, ...] = ("rollout", "reward", "evaluator")


class ProfileRefused(TandemError):
    """Another profile is being taken."""


@dataclass(slots=True)
class Profile:
    """One that was asked for. `result` is waits.json once it is done."""

    profile_id: str
    steps: int
    state: State = "asked"
    error: str = ""
    begun_at_step: int | None = None
    window_began_ns: int = 0
    steps_seen: int = 0
    result: dict[str, Any] = field(default_factory=dict)


class Profiler:
    """Of one run. `announced` stands in the job's announcement while services shall record."""

    def __init__(
        self, redis: Redis, keeper: RankKeeper, *, job_id: str, run_dir: Path, replica: str
    ) -> None:
        self.announced: ProfileAnnounced | None = None
        self.current: Profile | None = None
        self._told_by_ranks: list[list[dict[str, Any]]] = []  # each time, by rank
        self._redis = redis
        self._keeper = keeper
        self._job_id = job_id
        self._run_dir = run_dir
        self._replica = replica

    def ask(self, steps: int) -> Profile:
        """Profile `steps` steps, beginning with the one after the next."""
        if self.current is not None and self.current.state in ("asked", "recording"):
            raise ProfileRefused(f"profile {self.current.profile_id} is being taken")
        self.current = Profile(secrets.token_hex(2), steps)
        return self.current

    async def at_step(self, step: int, announce: Announce) -> None:
        """A step begins; `step` have been taken."""
        profile = self.current
        if profile is None or profile.state in ("done", "failed"):
            return
        if profile.state == "asked":
            await self._begin(profile, step, announce)
            return
        assert profile.begun_at_step is not None
        profile.steps_seen = max(0, step - profile.begun_at_step - 1)
        if not profile.window_began_ns:
            profile.window_began_ns = time.monotonic_ns()
        if profile.steps_seen >= profile.steps:
            await self._end(profile, announce)
        else:  # ranks that were lost meanwhile record again from here
            await self._ask_ranks(MAX_SPANS)

    async def at_end(self, announce: Announce) -> None:
        """No step follows: what was seen so far is the profile."""
        profile = self.current
        if profile is None or profile.state != "recording":
            return
        if profile.window_began_ns:
            profile.steps_seen += 1
            await self._end(profile, announce)

    def close(self) -> None:
        """The job stops here; it is not profiled any further."""
        if self.current is not None and self.current.state in ("asked", "recording"):
            self.current.state, self.current.error = "failed", "the job ended first"
        self.announced = None
        recorder().stop()

    async def _begin(self, profile: Profile, step: int, announce: Announce) -> None:
        await self._redis.delete(topology.spans(self._job_id))
        self.announced = ProfileAnnounced(
            job_id=self._job_id, profile_id=profile.profile_id, max_spans=MAX_SPANS
        )
        self._told_by_ranks = []
        recorder().start()
        await self._ask_ranks(MAX_SPANS)
        await announce()
        profile.state, profile.begun_at_step = "recording", step
        log.info("profile_begins", job_id=self._job_id, profile_id=profile.profile_id)

    async def _end(self, profile: Profile, announce: Announce) -> None:
        window_ns = (profile.window_began_ns, time.monotonic_ns())
        self.announced = None
        recorder().stop()
        await announce()
        clock = await clock_offset(self._redis)
        own = self._own(clock)
        await self._ask_ranks(0)
        ranks = _ranks(self._told_by_ranks, clock)
        services, missing = await self._services(profile)
        line = aligned([own, *ranks, *services], window_ns=window_ns, boot_id=own.boot_id)
        folder = self._run_dir / PROFILES / profile.profile_id
        try:
            profile.result = await asyncio.to_thread(
                write_profile, folder, line, profile_id=profile.profile_id, job_id=self._job_id,
                steps=profile.steps_seen, missing=missing,
            )  # fmt: skip
        except OSError as err:  # no room, or no right: the job goes on without it
            profile.state, profile.error = "failed", f"cannot write {folder}: {err.strerror}"
            log.warning("profile_failed", job_id=self._job_id, error=profile.error)
            return
        profile.state = "done"
        await self._redis.delete(topology.spans(self._job_id))
        log.info("profile_done", job_id=self._job_id, folder=str(folder))

    async def _ask_ranks(self, max_spans: int) -> None:
        self._told_by_ranks.append(await self._keeper.spans(max_spans))

    def _own(self, clock: ClockOffset) -> Process:
        spans, dropped = recorder().drain()
        host, pid = socket.gethostname(), os.getpid()
        process = Process(self._replica, "trainer", host, pid, boot_id(), clock)
        process.num_dropped, process.spans = dropped, spans
        return process

    async def _services(self, profile: Profile) -> tuple[list[Process], list[str]]:
        """What the services sent; and the replicas whose last batch did not come in time."""
        waiting = {
            one.name
            for service in SERVICES
            for one in await live_replicas(self._redis, service)
            if one.job_id == self._job_id
        }
        found: dict[str, Process] = {}
        last_id, deadline_s = b"0", time.monotonic() + COLLECT_S
        while waiting and time.monotonic() < deadline_s:
            stream = topology.spans(self._job_id)
            for entry_id, body in await read_from(self._redis, stream, last_id, 0.2, limit=50):
                last_id = entry_id
                try:
                    batch = SpanBatch.unpack(body)
                except Rejected as err:
                    log.warning("spans_unreadable", error=str(err))
                    continue
                if batch.profile_id == profile.profile_id:
                    _add(found, batch)
                    waiting -= {batch.replica} if batch.is_last else set()
        if waiting:
            log.warning("spans_missing", replicas=sorted(waiting), after_s=COLLECT_S)
        return list(found.values()), sorted(waiting)


def write_profile(
    folder: Path, line: Timeline, *, profile_id: str, job_id: str, steps: int, missing: list[str]
) -> dict[str, Any]:
    """Both files; what waits.json holds."""
    waits = waits_of(line)
    facts: dict[str, Any] = {
        "job_id": job_id,
        "profile_id": profile_id,
        "steps": steps,
        "seconds": line.seconds,
        "dropped_spans": {one.name: one.num_dropped for one in line.processes if one.num_dropped},
        "clock_uncertainty_s": _uncertainty_s(line),
        "missing": missing,
    }
    result = {
        **facts,
        "sentences": sentences(waits),
        "most_waited_for": most_waited_for(waits),
        "processes": [one.document() for one in waits],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE_FILE).write_text(json.dumps(chrome_trace(line, facts=facts)))
    (folder / WAITS_FILE).write_text(json.dumps(result, indent=2) + "\n")
    return result


def _uncertainty_s(line: Timeline) -> float:
    """Between processes of different boots; within one there is none."""
    boots: dict[str, int] = {}
    for one in line.processes:
        known = boots.get(one.boot_id, one.clock.uncertainty_ns)
        boots[one.boot_id] = min(known, one.clock.uncertainty_ns)
    return sum(sorted(boots.values())[-2:]) / 1e9 if len(boots) > 1 else 0.0


def _add(found: dict[str, Process], batch: SpanBatch) -> None:
    is_engine = batch.process != batch.replica
    clock = ClockOffset(batch.clock_offset_ns, batch.clock_uncertainty_ns)
    process = found.setdefault(
        f"{batch.process} {batch.pid}",
        Process(
            batch.process,
            "engine" if is_engine else batch.service,  # type: ignore[arg-type]  # of SERVICES
            batch.host,
            batch.pid,
            batch.boot_id,
            clock,
            owner=batch.replica if is_engine else "",
        ),
    )
    if clock.uncertainty_ns < process.clock.uncertainty_ns:
        process.clock = clock
    process.num_dropped = batch.num_dropped
    process.spans += [Span(*one) for one in batch.spans]


def _ranks(told: list[list[dict[str, Any]]], clock: ClockOffset) -> list[Process]:
    """Rank 0 runs on this process's host; others say how far their clock is from rank 0's.

    A rank that was started again has another process id, and stays the same row.
    """
    found: dict[int, Process] = {}
    for ranks in told:
        for rank, one in enumerate(ranks):
            offset = ClockOffset(
                clock.offset_ns - one["clock_ahead_ns"],
                clock.uncertainty_ns + one["clock_uncertainty_ns"],
            )
            process = found.setdefault(
                rank,
                Process(f"rank {rank}", "rank", one["host"], one["pid"], one["boot_id"], offset),
            )
            process.num_dropped = one["dropped"]
            process.spans += [Span(*span) for span in one["spans"]]
    return list(found.values())
