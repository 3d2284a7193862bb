"""Time lines that we write, read by Perfetto itself: every span where and as long as it was."""

import pytest

from services.trainer.profile.timeline import Process, Timeline, chrome_trace
from shared.spans import ClockOffset, Span
from tests.browser.pages import CHROMIUM
from tests.browser.perfetto import opened

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.timeout(180),
]
MS = 1_000_000
BEGIN_NS = 1_764_000_000_000_000_000  # as the broker's clock has it: it does not fit a double
TROUBLE = 'grüße "<b>\\ \n|Δ log p|'


def process(name: str, number: int, spans: list[Span]) -> Process:
    return Process(name, "rollout", "host-a", number, "boot", ClockOffset(0, 0), spans=spans)


def span(name: str, track: str, begin_ns: int, end_ns: int, **facts: object) -> Span:
    return Span(name, track, BEGIN_NS + begin_ns, BEGIN_NS + end_ns, facts)


@pytest.fixture
def line() -> Timeline:
    """Lead-in, spans that overlap, touch, last nothing or hours, in processes of one name."""
    spans = [
        span("lead-in", "steps", -40 * MS, -30 * MS),
        span("a", "groups", 0, 10 * MS, group="demo.g000001"),
        span("b", "groups", 5 * MS, 15 * MS, text=TROUBLE, shares={"x": 0.25}, cut=True),
        span("c", "groups", 10 * MS, 20 * MS),
        span("d", "groups", 20 * MS, 20 * MS),
        *(span("tick", "steps", at * 1001, at * 1001 + 1001) for at in range(2000)),
    ]
    long = [span(TROUBLE, "a track, and more", 1, 5 * 3600 * 1000 * MS)]
    processes = [process("rollout-0", 3, spans), process("rollout-0", 2, long), process("e", 1, [])]
    return Timeline(BEGIN_NS, BEGIN_NS + 25 * MS, processes)


async def test_perfetto_reads_every_span_of_a_time_line(line: Timeline) -> None:
    first_ns = min(one.begin_ns for each in line.processes for one in each.spans)
    all_spans = [one for each in line.processes for one in each.spans]
    all_spans.append(Span("window", "window", line.begin_ns, line.end_ns, {}))
    async with opened(chrome_trace(line, facts={"job_id": "demo"})) as perfetto:
        assert await perfetto.complaints() == []
        found = await perfetto.ask("select name, category, ts, dur, depth from slice")
        assert sorted(tuple(row) for row in found) == sorted(
            (one.name, one.track, one.begin_ns - first_ns, one.end_ns - one.begin_ns, 0)
            for one in all_spans
        )
        rows = await perfetto.ask(
            "select process.name, thread.name, count(*) from slice"
            " join thread_track on slice.track_id = thread_track.id"
            " join thread using (utid) join process using (upid)"
            " where not thread.is_main_thread group by upid, utid"
        )
        assert sorted(tuple(row) for row in rows) == [
            ("profiled steps", "window", 1),
            ("rollout-0 (pid 2, host-a)", "a track, and more", 1),
            ("rollout-0 (pid 3, host-a)", "groups", 3),
            ("rollout-0 (pid 3, host-a)", "groups 2", 1),
            ("rollout-0 (pid 3, host-a)", "steps", 2001),
        ]
        facts = await perfetto.ask(
            "select key, display_value from slice join args using (arg_set_id) where name = 'b'"
        )
        assert dict(facts) == {"args.text": TROUBLE, "args.shares.x": "0.25", "args.cut": "true"}


async def test_what_perfetto_drops_is_noticed(line: Timeline) -> None:
    """A trace whose first event is before zero, as a clock set to the window's begin has it."""
    trace = chrome_trace(line, facts={})
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            one["ts"] -= 1000.0
    async with opened(trace) as perfetto:
        assert await perfetto.complaints() == [["trace_sorter_negative_timestamp_dropped", 1]]
