"""The run's record: `events.jsonl`, one event a line, each event once and in one order.

    other services ──> events stream ──┐
                                       ├──> events.jsonl ──> SSE, report
    the conductor ───> books' journal ─┘

A line carries where it came from (`stream_id`, or `seq` of the journal), so after a crash the file
itself says what it already has.
"""

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
from redis.asyncio import Redis

from services.trainer.books import Books
from shared import topology
from shared.errors import Rejected
from shared.messages import Event
from shared.streams import read_from
from shared.telemetry import now_s

log = structlog.get_logger()
EVENTS_FILE = "events.jsonl"
BLOCK_S = 0.4
TRIM_EVERY = 1000  # events
OnEvent = Callable[[Event], Awaitable[None]]


class EventMaker(Protocol):
    def __call__(self, name: str, /, **fields: Any) -> Event: ...


def event_maker(job_id: str, replica: str) -> EventMaker:
    """Builds the trainer's own events."""

    def make(name: str, /, **fields: Any) -> Event:
        return Event(
            name=name,
            job_id=job_id,
            service="trainer",
            replica=replica,
            at_s=now_s(),
            fields=fields,
        )

    return make


@dataclass(frozen=True, slots=True)
class _Position:
    """How far the file has come."""

    num_lines: int = 0
    seq: int = 0
    stream_id: bytes = b"0"


class EventLog:
    """Appends to the file of one run, and wakes those who follow it. One writer per file."""

    def __init__(self, run_dir: Path, books: Books) -> None:
        self.path = run_dir / EVENTS_FILE
        self._books = books
        _mend(self.path)
        self._at = _position(self.path)
        self._file = self.path.open("ab")
        self.flush_journal()

    @property
    def num_lines(self) -> int:
        return self._at.num_lines

    @property
    def stream_id(self) -> bytes:
        """The last entry of the events stream that the file holds."""
        return self._at.stream_id

    def note(self, event: Event) -> None:
        """Keep an event of the conductor."""
        self._books.note_event(event)
        self.flush_journal()

    def flush_journal(self) -> None:
        """Copy what the books' journal has and the file lacks."""
        for seq, body in self._books.journal(self._at.seq):
            self._append(body | {"seq": seq})
            self._at = _Position(self._at.num_lines, seq, self._at.stream_id)
        self._file.flush()

    def take(self, stream_id: bytes, event: Event) -> None:
        """Keep an event of another service."""
        self._append(event.model_dump() | {"stream_id": stream_id.decode()})
        self._at = _Position(self._at.num_lines, self._at.seq, stream_id)
        self._file.flush()

    def settle(self) -> None:
        """Have all that was taken on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append(self, body: dict[str, Any]) -> None:
        self._file.write(json.dumps(_without_nan(body), allow_nan=False).encode() + b"\n")
        self._at = _Position(self._at.num_lines + 1, self._at.seq, self._at.stream_id)


async def follow_events(
    redis: Redis, job_id: str, record: EventLog, on_event: OnEvent, stop: asyncio.Event
) -> None:
    """Copy the events of the other services until `stop`; each also goes to `on_event`.

    What is copied, and on disk, leaves the broker.
    """
    stream = topology.events(job_id)
    num_copied = 0
    while not stop.is_set():
        for entry_id, body in await read_from(redis, stream, record.stream_id, BLOCK_S):
            event = _read_event(entry_id, body, job_id)
            await on_event(event)  # first: after a crash it is told once more, never not at all
            record.take(entry_id, event)
            num_copied += 1
        if num_copied >= TRIM_EVERY:
            await asyncio.to_thread(record.settle)
            await redis.xtrim(stream, minid=record.stream_id, approximate=False)
            num_copied = 0


def _read_event(entry_id: bytes, body: bytes, job_id: str) -> Event:
    """What somebody told, or that it cannot be read: such an event must not end the job, as it
    would come again to the next process."""
    try:
        event = Event.unpack(body)
        json.dumps(event.fields)
    except (Rejected, TypeError, ValueError, RecursionError) as err:
        log.warning("event_unreadable", entry_id=entry_id.decode(), error=str(err))
        return event_maker(job_id, "")("event_unreadable", error=str(err))
    return event


class EventTail:
    """Reads a run's file on from a line number, as it grows; any number of readers per file."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        self._path = path
        self._after = after
        self._offset = 0
        self.num_lines = 0

    def read_more(self, max_lines: int = 1000) -> list[tuple[int, str]]:
        """Complete lines not read yet, with their numbers (from 1)."""
        if not self._path.exists():
            return []
        found: list[tuple[int, str]] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while len(found) < max_lines and (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                self.num_lines += 1
                if self.num_lines > self._after:
                    found.append((self.num_lines, line.decode().rstrip("\n")))
        return found


def _mend(path: Path) -> None:
    """Cut off a last line that a crash left unfinished."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        log.warning("torn_event_cut", path=str(path), bytes=len(content) - whole)
        with path.open("r+b") as file:
            file.truncate(whole)


def _position(path: Path) -> _Position:
    at = _Position()
    if not path.exists():
        return at
    with path.open("rb") as file:
        for line in file:
            body = json.loads(line)
            at = _Position(
                at.num_lines + 1,
                int(body.get("seq", at.seq)),
                str(body.get("stream_id", at.stream_id.decode())).encode(),
            )
    return at


def _without_nan(value: Any) -> Any:
    """JSON knows neither nan nor infinity; readers in browsers refuse them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return value
