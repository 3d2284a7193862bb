"""Time lines drawn by hand, whose shares can be read off with a ruler."""

import json
from pathlib import Path

import pytest

from services.trainer.profile.session import write_profile
from services.trainer.profile.timeline import Process, aligned, chrome_trace
from services.trainer.profile.waiting import Waits, most_waited_for, waits_of
from shared.spans import ClockOffset, Span

MS = 1_000_000
BOOT, OTHER_BOOT = "boot-a", "boot-b"


def process(name: str, kind: str, *spans: Span, **traits: object) -> Process:
    clock = ClockOffset(1000 * MS, 10)
    given = {"host": "h", "pid": 1, "boot_id": BOOT, "clock": clock, **traits}
    return Process(name, kind, **given, spans=list(spans))  # type: ignore[arg-type]


def span(name: str, track: str, begin_ms: float, end_ms: float, **facts: object) -> Span:
    return Span(name, track, round(begin_ms * MS), round(end_ms * MS), facts)


def ring(*, sampled: tuple[int, int], graded: tuple[int, int], trained: tuple[int, int]):
    """One group on its way round, in a window of 100 ms."""
    return [
        process(
            "trainer", "trainer",
            span("wait", "step", 0, trained[0], groups=["g1"]),
            span("train", "step", *trained),
        ),
        process("rank 0", "rank", span("train_step", "operations", *trained)),
        process("rollout-0", "rollout", span("group", "groups", *sampled, group="g1")),
        process(
            "rollout-0 engine", "engine", span("step", "steps", *sampled), owner="rollout-0"
        ),
        process("reward-0", "reward", span("group", "groups", *graded, group="g1")),
        process("evaluator", "evaluator"),
    ]  # fmt: skip


def by_name(processes: list[Process]) -> dict[str, Waits]:
    line = aligned(processes, window_ns=(0, 100 * MS), boot_id=BOOT)
    return {one.process: one for one in waits_of(line)}


def test_shares_follow_the_group_round() -> None:
    found = by_name(ring(sampled=(0, 20), graded=(20, 80), trained=(80, 100)))
    assert found["rank 0"].works == pytest.approx(0.2)
    assert found["rank 0"].for_whom == pytest.approx({"reward-0": 0.6, "rollout-0 engine": 0.2})
    assert found["trainer"].for_whom == pytest.approx(
        {"reward-0": 0.6, "rollout-0 engine": 0.2, "rank 0": 0.2}
    )
    engine = found["rollout-0 engine"]
    assert engine.works == pytest.approx(0.2)
    assert engine.for_whom == pytest.approx({"reward-0": 0.6, "rank 0": 0.2})
    assert found["reward-0"].works == pytest.approx(0.6)
    assert found["reward-0"].for_whom == pytest.approx({"rollout-0 engine": 0.2, "rank 0": 0.2})
    assert found["evaluator"].nothing_to_do == pytest.approx(1)
    assert most_waited_for(list(found.values())) == "reward-0"


@pytest.mark.parametrize(
    ("slow", "times"),
    [
        ("rollout-0 engine", ((0, 80), (80, 90), (90, 100))),
        ("reward-0", ((0, 10), (10, 90), (90, 100))),
        ("rank 0", ((0, 10), (10, 20), (20, 100))),
    ],
)
def test_the_slow_one_is_the_one_waited_for(slow: str, times: tuple[tuple[int, int], ...]) -> None:
    sampled, graded, trained = times
    found = by_name(ring(sampled=sampled, graded=graded, trained=trained))
    assert most_waited_for(list(found.values())) == slow
    for one in found.values():
        assert one.works + one.idle + one.nothing_to_do == pytest.approx(1)


def test_a_group_that_nobody_holds_is_handed_over() -> None:
    found = by_name(ring(sampled=(0, 20), graded=(50, 60), trained=(80, 100)))
    assert found["reward-0"].for_whom["hand-over"] == pytest.approx(0.5)  # 20-50 and 60-80
    assert found["rank 0"].for_whom["hand-over"] == pytest.approx(0.5)


def test_a_held_server_waits_for_what_the_evaluator_waits_for() -> None:
    processes = ring(sampled=(90, 92), graded=(92, 94), trained=(94, 100))
    rollout, reward, evaluator = processes[2], processes[4], processes[5]
    rollout.spans.append(span("held", "held", 0, 80))
    reward.spans.append(span("grade", "requests", 10, 70))
    evaluator.spans += [span("suite", "evaluations", 0, 80), span("grade", "problems", 10, 70)]
    found = by_name(processes)
    assert found["rollout-0 engine"].for_whom["reward-0"] >= 0.6
    assert found["rank 0"].for_whom["reward-0"] >= 0.6


def test_hosts_are_joined_by_the_brokers_clock_and_each_boot_by_its_best_reading() -> None:
    """The other host's clock is 5 s ahead; its second reading is the better one."""
    there = span("group", "groups", 5010, 5020, group="g1")
    bad, good = ClockOffset(-3990 * MS, 900), ClockOffset(-4000 * MS, 5)
    processes = [
        process("trainer", "trainer"),
        process("rollout-0", "rollout", there, boot_id=OTHER_BOOT, clock=bad),
        process("reward-0", "reward", boot_id=OTHER_BOOT, clock=good),
    ]
    line = aligned(processes, window_ns=(0, 100 * MS), boot_id=BOOT)
    moved = line.named("rollout-0").spans[0]
    assert (moved.begin_ns - line.begin_ns, moved.end_ns - line.begin_ns) == (10 * MS, 20 * MS)


def test_overlapping_spans_of_a_track_get_rows_and_nested_tracks_their_own() -> None:
    spans = [span("a", "groups", 0, 10), span("b", "groups", 5, 15), span("c", "groups", 10, 20)]
    line = aligned([process("p", "trainer", *spans)], window_ns=(0, 20 * MS), boot_id=BOOT)
    events = chrome_trace(line, facts={})["traceEvents"]
    rows = {one["name"]: one["tid"] for one in events if one["ph"] == "X"}
    assert rows["a"] == rows["c"] != rows["b"]
    titles = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert titles == {"window", "groups", "groups 2"}
    (b,) = (one for one in events if one["name"] == "b")
    assert (b["ts"], b["dur"]) == (5000.0, 10000.0)


def test_a_trace_begins_at_its_first_span_and_marks_the_window() -> None:
    """Perfetto drops what begins before zero, and so did lose the lead-in."""
    spans = [span("a", "groups", -30, -10), span("b", "groups", 5, 15)]
    line = aligned([process("p", "trainer", *spans)], window_ns=(0, 20 * MS), boot_id=BOOT)
    events = chrome_trace(line, facts={})["traceEvents"]
    found = {one["name"]: (one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert found == {"a": (0, 20_000), "window": (30_000, 20_000), "b": (35_000, 10_000)}


def test_both_files_are_written(tmp_path: Path) -> None:
    processes = ring(sampled=(0, 20), graded=(20, 80), trained=(80, 100))
    line = aligned(processes, window_ns=(0, 100 * MS), boot_id=BOOT)
    result = write_profile(
        tmp_path / "p", line, profile_id="p", job_id="j", steps=1, missing=["reward-1"]
    )
    assert json.loads((tmp_path / "p" / "waits.json").read_text()) == result
    assert json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]
    assert result["missing"] == ["reward-1"]
    assert result["sentences"][0].startswith("Largest idle share: ")
