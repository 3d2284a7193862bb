"""The planner against a device: states at rest, and the peak of training steps."""

from pathlib import Path
from typing import Any

import pytest

from shared.planner import plan
from tests.gpu.actor_run import SINGLE, Load, measure_apart, speed_job, write_random_release

GIB = 2**30


@pytest.mark.timeout(300)
def test_the_plan_holds_on_a_device(tmp_path: Path, figures: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    write_random_release(folder, SINGLE)
    found = measure_apart(folder, {})
    memory = plan(SINGLE, speed_job(folder, {}, Load())).stages[0].memory
    planned = {"states_gib": memory.states / GIB, "peak_gib": memory.total / GIB}
    measured = {"states_gib": found["gib_after_start"], "peak_gib": found["gib_peak"]}
    figures["plan"] = {"planned": planned, "measured": measured}
    assert planned["states_gib"] == pytest.approx(measured["states_gib"], rel=0.01)
    activations = measured["peak_gib"] - measured["states_gib"]
    assert planned["peak_gib"] - planned["states_gib"] == pytest.approx(activations, rel=0.25)
