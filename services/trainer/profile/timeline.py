"""Spans of many processes on one time line, and that line as a Chrome trace.

Processes of one boot share a clock, so their order is exact; those of different boots are joined by
the broker's clock, each boot by its best reading. Format: "Trace Event Format" (Google, 2016),
which Perfetto (https://ui.perfetto.dev) and chrome://tracing read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.spans import ClockOffset, Span

Kind = Literal["trainer", "rank", "rollout", "engine", "reward", "evaluator"]
WINDOW = "window"
_ROWS = 100_000  # of one process at most: as many as spans, and some
ORDER: tuple[Kind, ...] = ("trainer", "rank", "rollout", "engine", "reward", "evaluator")


@dataclass(slots=True)
class Process:
    """`spans` are in the broker's time once they are in a `Timeline`. An engine's `owner` is its
    rollout service."""

    name: str
    kind: Kind
    host: str
    pid: int
    boot_id: str
    clock: ClockOffset
    owner: str = ""
    num_dropped: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Processes in the order of ORDER. Only what happened in the window is counted later."""

    begin_ns: int
    end_ns: int
    processes: list[Process]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def named(self, name: str) -> Process:
        return next(one for one in self.processes if one.name == name)


def best_clocks(processes: Iterable[Process]) -> dict[str, ClockOffset]:
    """One reading for each boot: the least uncertain of those that its processes made."""
    best: dict[str, ClockOffset] = {}
    for one in processes:
        known = best.get(one.boot_id)
        if known is None or one.clock.uncertainty_ns < known.uncertainty_ns:
            best[one.boot_id] = one.clock
    return best


def aligned(processes: Sequence[Process], *, window_ns: tuple[int, int], boot_id: str) -> Timeline:
    """`window_ns` is of the monotonic clock of `boot_id`."""
    clocks = best_clocks(processes)
    ours = clocks[boot_id].offset_ns
    for one in processes:
        offset_ns = clocks[one.boot_id].offset_ns
        one.spans = sorted(
            (
                span._replace(begin_ns=span.begin_ns + offset_ns, end_ns=span.end_ns + offset_ns)
                for span in one.spans
            ),
            key=lambda span: (span.begin_ns, -span.end_ns),
        )
    ordered = sorted(processes, key=lambda one: (ORDER.index(one.kind), one.name))
    begin_ns, end_ns = window_ns
    return Timeline(begin_ns + ours, end_ns + ours, ordered)


def chrome_trace(line: Timeline, *, facts: dict[str, Any]) -> dict[str, Any]:
    """Complete events in microseconds from the first of them: Perfetto drops those before zero.

    The first row is the window, which the lead-in comes before. A track with overlapping spans
    gets as many rows as it needs.
    """
    window = Span(WINDOW, WINDOW, line.begin_ns, line.end_ns, {})
    first_ns = min(span.begin_ns for one in line.processes for span in [window, *one.spans])
    events = _events_of(1, "profiled steps", [window], first_ns)
    for number, one in enumerate(line.processes, start=2):
        label = f"{one.name} (pid {one.pid}, {one.host})"
        events += _events_of(number, label, one.spans, first_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _events_of(
    number: int, label: str, spans: Iterable[Span], first_ns: int
) -> list[dict[str, Any]]:
    """Its names, then its events. A row's id is no process's: Perfetto would call it its main."""
    events = [
        _about("process_name", number, 0, name=label),
        _about("process_sort_index", number, 0, sort_index=number),
    ]
    rows: dict[str, int] = {}
    for track, row, span in _rows(spans):
        title = track if row == 0 else f"{track} {row + 1}"
        if title not in rows:
            rows[title] = _ROWS * number + len(rows)
            events.append(_about("thread_name", number, rows[title], name=title))
        events.append(_event(span, number, rows[title], first_ns))
    return events


def _event(span: Span, pid: int, tid: int, first_ns: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": span.track,
        "ph": "X",
        "ts": (span.begin_ns - first_ns) / 1000,
        "dur": (span.end_ns - span.begin_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": span.facts,
    }


def _about(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _rows(spans: Iterable[Span]) -> Iterable[tuple[str, int, Span]]:
    """Each span with the first row of its track that is free at its begin."""
    free_at: dict[str, list[int]] = {}
    for span in spans:
        ends = free_at.setdefault(span.track, [])
        row = next((at for at, end_ns in enumerate(ends) if end_ns <= span.begin_ns), len(ends))
        ends[row : row + 1] = [span.end_ns]
        yield span.track, row, span
