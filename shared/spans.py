"""What this process did and when, while a profile of the job is taken; at other times nothing.

    with span("grade", "groups", group=…):      costs one look at a flag while no profile is taken
    recorder().start(…) ... drain() ... stop()   keeps a bounded number, and counts what it dropped

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of one boot share. A process that has
a broker also says how far that clock is from the broker's, so that several hosts get one time line.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

MAX_SPANS = 20_000  # of one process in one profile
_NUM_CLOCK_READINGS = 5
Facts = dict[str, Any]


class Span(NamedTuple):
    """`track` is the row that it is drawn in; spans of one track may overlap."""

    name: str
    track: str
    begin_ns: int
    end_ns: int
    facts: Facts


class ClockOffset(NamedTuple):
    """Broker's time less this boot's monotonic time, and how far that may be off."""

    offset_ns: int
    uncertainty_ns: int


class Recorder:
    """The spans of one process. Safe in threads; one profile at a time."""

    def __init__(self) -> None:
        self.is_on = False
        self._max = 0
        self._spans: list[Span] = []
        self._open: dict[int, tuple[str, str, int, Facts]] = {}
        self._num_kept = 0
        self._num_dropped = 0
        self._lock = threading.Lock()

    def start(self, max_spans: int = MAX_SPANS) -> None:
        """Begin; again, while it is on, changes nothing."""
        with self._lock:
            if self.is_on:
                return
            self._spans, self._open = [], {}
            self._max, self._num_kept, self._num_dropped = max_spans, 0, 0
            self.is_on = True

    def stop(self) -> None:
        """End: what is still under way counts up to now."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if self.is_on:
                self.is_on = False
                for name, track, begin_ns, facts in self._open.values():
                    self._keep(Span(name, track, begin_ns, now_ns, {**facts, "cut": True}))
                self._open = {}

    def drain(self) -> tuple[list[Span], int]:
        """Spans that ended since the last call; and how many did not fit since the start."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans, self._num_dropped

    def note(self, name: str, track: str, begin_ns: int, end_ns: int, **facts: Any) -> None:
        """A span whose times are known."""
        if self.is_on:
            with self._lock:
                self._keep(Span(name, track, begin_ns, end_ns, facts))

    @contextlib.contextmanager
    def measure(self, name: str, track: str, facts: Facts) -> Iterator[Facts]:
        begin_ns = time.monotonic_ns()
        key = id(facts)
        with self._lock:
            self._open[key] = (name, track, begin_ns, facts)
        try:
            yield facts
        finally:
            end_ns = time.monotonic_ns()
            with self._lock:
                if self._open.pop(key, None) is not None:
                    self._keep(Span(name, track, begin_ns, end_ns, facts))

    def _keep(self, span: Span) -> None:
        if self._num_kept < self._max:
            self._spans.append(span)
            self._num_kept += 1
        else:
            self._num_dropped += 1


@cache
def recorder() -> Recorder:
    """The process's own."""
    return Recorder()


class _Off:
    """Of a process that is not profiled; what is noted goes nowhere."""

    def __enter__(self) -> Facts:
        return {}

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()


def span(name: str, track: str, **facts: Any) -> AbstractContextManager[Facts]:
    """Record the block while a profile is taken; the block may add to the facts it gets."""
    one = recorder()
    return one.measure(name, track, facts) if one.is_on else cast(Any, _OFF)


@cache
def boot_id() -> str:
    """The same for all processes that share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def clock_offset(redis: Redis) -> ClockOffset:
    """By the quickest of a few round trips, as Cristian's algorithm reads a clock (1989)."""
    best: ClockOffset | None = None
    for _ in range(_NUM_CLOCK_READINGS):
        before_ns = time.monotonic_ns()
        seconds, micros = await redis.time()
        after_ns = time.monotonic_ns()
        broker_ns = (seconds * 1_000_000 + micros) * 1000
        found = ClockOffset(broker_ns - (before_ns + after_ns) // 2, (after_ns - before_ns) // 2)
        if best is None or found.uncertainty_ns < best.uncertainty_ns:
            best = found
    assert best is not None
    return best
