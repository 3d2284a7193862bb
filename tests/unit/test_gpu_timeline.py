"""What a GPU run's time line says, from events and nvidia-smi's rows that were written by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_timeline import gpu_rows, in_bins, sampler_shares, window_of
from services.trainer.report.events import EVENTS_FILE, RunEvents, read_events
from shared.messages import Event

BEGAN_S = 1_796_035_200.0  # 10:40:00 UTC
ROWS = """\
2026/11/30 10:40:00.500, 0, 1024, 10
2026/11/30 10:40:00.500, 1, 2048, 0
2026/11/30 10:40:01.500, 0, 3072, 30
2026/11/30 10:40:05.000, 0, 1000, 50
"""


def event(name: str, at_s: float, **fields: Any) -> Event:
    return Event(
        name=name,
        job_id="job",
        service="trainer",
        replica="trainer",
        at_s=BEGAN_S + at_s,
        fields=fields,
    )


@pytest.fixture
def found(tmp_path: Path) -> RunEvents:
    update = {"stage_s": 1.0, "load_s": 2.0, "pause_s": 3.0, "policy_version": 2}
    events = [
        event("step", 10.0, step=1, step_seconds=2.0, seconds={"wait": 1.0, "export": 1.0}),
        *(event("group_sampled", 10 + n / 10, policy_version=1) for n in range(1, 11)),
        event("update_committed", 18.0, began_at_s=BEGAN_S + 12, **update),
        event("step", 24.0, step=2, step_seconds=9.0, seconds={"wait": 5.0, "checkpoint": 4.0}),
    ]
    file = tmp_path / EVENTS_FILE
    file.write_text("".join(one.model_dump_json() + "\n" for one in events))
    return read_events(file)


def test_a_samplers_time_is_told_apart_and_a_last_checkpoint_left_out(found: RunEvents) -> None:
    shares = sampler_shares(found)  # of ten seconds, 10 to 20
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["sampling"] == pytest.approx(0.1, abs=0.011)
    assert shares["paused"] == pytest.approx(0.3, abs=0.011)
    assert shares["nothing to sample, update in preparation"] == pytest.approx(0.3, abs=0.011)
    assert shares["nothing to sample, no update"] == pytest.approx(0.3, abs=0.011)


def test_a_window_has_all_that_touches_it_in_order(found: RunEvents) -> None:
    kept = window_of(found, {}, BEGAN_S, (10.5, 13.5))
    assert kept["trainer"] == []
    assert kept["update"] == [["stage", 12.0, 13.0, 2], ["prepare", 13.0, 15.0, 2]]
    assert [at for at, _ in kept["groups"]] == [10.6, 10.7, 10.8, 10.9, 11.0]
    phases = window_of(found, {}, BEGAN_S, (0.0, 30.0))["trainer"]
    assert [(name, step) for name, _, _, step in phases] == [
        *(("wait", 1), ("export", 1)),
        *(("wait", 2), ("checkpoint", 2)),
    ]
    assert phases[1][1:3] == [9.0, 10.0]


def test_rows_of_nvidia_smi_are_on_the_clock_of_the_events(tmp_path: Path) -> None:
    file = tmp_path / "gpu.csv"
    file.write_text(ROWS)
    gpus = gpu_rows(file)
    assert sorted(gpus) == [0, 1]
    assert np.array_equal(gpus[1], [[BEGAN_S + 0.5, 2048, 0]])
    kept = in_bins(gpus, BEGAN_S, BEGAN_S + 6)
    assert kept["0"] == [[0.0, 3072, 20], [4.0, 1000, 50]]
    assert sorted(gpu_rows(file, [1])) == [1]
