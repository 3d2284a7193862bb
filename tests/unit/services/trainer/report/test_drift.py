"""Which bound a job's settings promise, and what the report says of it."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.report import sentences
from services.trainer.report.drift import drift_bound
from tests.unit.services.trainer.report.test_report import Run

FP32: dict[str, Any] = {
    "actor": {"quantisation": "none", "dtype": "float32"},
    "rollout": {"weights": "float32", "quantise_activations": False},
    "algorithm": {"max_lag": 0},
}


@pytest.mark.parametrize(
    ("job", "bound"),
    [
        ({}, 0.04),
        ({"actor": {"quantisation": "full"}}, 0.04),
        ({"actor": {"replay": {"routing": True, "indexer": False}}}, 0.02),
        ({"actor": {"replay": {"routing": False, "indexer": True}}}, 0.04),
        (FP32, 1e-4),
        (FP32 | {"algorithm": {"max_lag": 1}}, 0.04),
        (FP32 | {"actor": {"quantisation": "none", "dtype": "bfloat16"}}, 0.04),
        (FP32 | {"actor": {"dtype": "float32", "precision": "fp8"}}, 0.04),
        (FP32 | {"rollout": {"weights": "float32", "quantise_activations": True}}, 0.04),
        ({"actor": None, "rollout": "x"}, 0.04),  # a document that nobody can read promises least
    ],
)
def test_the_bound_follows_the_settings(job: dict[str, Any], bound: float) -> None:
    assert drift_bound(job).value == bound


@pytest.mark.parametrize(
    ("job", "delta", "said"),
    [
        ({}, 0.01, "With an FP8 sampler a step's mean should stay below 0.04: every step was."),
        ({}, 0.05, "below 0.04: 4 of 4 steps were not."),
        (FP32, 3e-7, "With FP32 on both sides at lag 0 a step's mean should stay below 0.0001"),
    ],
)
def test_the_report_says_whether_it_held(
    tmp_path: Path, job: dict[str, Any], delta: float, said: str
) -> None:
    run = Run(tmp_path)
    run.add("job_started", job={"name": "demo"} | job)
    for step in range(1, 5):
        run.step(step, reward=0.5, delta=delta)
    assert said in sentences.delta_logprob(run.summary())


def test_what_is_expected_and_what_pauses_a_job_are_told_apart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("job_started", job={"bounds": {"max_mean_abs_delta_logprob": 1.5}})
    run.step(1, reward=0.5, delta=0.01)
    told = sentences.delta_logprob(run.summary())
    assert "should stay below 0.04: every step was. That is what was measured" in told
    assert "this one pauses when a step's mean is above 1.5 (bounds.max_mean" in told
    assert "Up to 1 version of training came between" in told


def test_bytes_of_routes_are_told_where_there_are_any(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("job_started", job={"name": "demo"})
    for step in range(1, 5):
        run.add("step", step=step, tokens=1000, route_bytes=6500, delta_logprob_mean=0.01)
    told = sentences.delta_logprob(run.summary())
    assert "The sampler's choices came along, 0.026 MB of them (6.5 bytes a token)." in told
