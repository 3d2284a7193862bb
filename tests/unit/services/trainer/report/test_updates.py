"""The time line of weight updates: every second of an update is in one phase."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.report import write_report
from services.trainer.report.events import read_events
from services.trainer.report.updates import committed_updates
from tests.unit.services.trainer.report.test_report import Run


def fields(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "server": "rollout-0",
        "policy_version": 3,
        "began_at_s": 100.0,
        "seconds": 2.0,
        "stage_s": 0.5,
        "load_s": 0.1,
        "restore_s": 0.3,
        "probe_s": 0.2,
        "pause_s": 0.01,
        "resume_s": 0.09,
        "bytes": 1000,
        "pulled_bytes": 80,
        "probe_mean_abs_delta": 0.02,
    }
    return values | changes


def test_phases_add_up_to_the_update_in_order_of_their_beginnings(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("update_committed", **fields(began_at_s=200.0, policy_version=4))
    run.add("update_committed", **fields(probe_mean_abs_delta=None))
    run.add("update_committed", server="old", policy_version=1, pause_s=0.1)  # before there were
    first, second = committed_updates(read_events(tmp_path / "events.jsonl"))
    assert (first.policy_version, second.policy_version) == (3, 4)
    assert sum(first.seconds.values()) == pytest.approx(2.0)
    assert first.seconds["wait"] == pytest.approx(0.8)
    run.add("update_committed", **fields(proven_in_pause=True, pause_s=0.6))
    _, inside, _ = committed_updates(read_events(tmp_path / "events.jsonl"))
    assert sum(inside.seconds.values()) == pytest.approx(2.0)
    assert inside.seconds["pause"] == pytest.approx(0.1)
    assert (first.pulled_share, first.probe_delta) == (0.08, None)


def test_the_report_draws_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in range(15):
        run.add("update_committed", **fields(policy_version=version, began_at_s=float(version)))
    page = write_report(tmp_path).read_text()
    assert (tmp_path / "updates.png").stat().st_size > 10_000
    assert "share of them that servers pulled, mean" in page
