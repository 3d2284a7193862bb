"""The benchmark of asynchrony measures one job whatever becomes of others, and counts seeds."""

from typing import Any

import pytest
from pydantic import BaseModel

from benchmarks.asynchrony import LAGS, Run, effects, job_document
from shared.job import Job

# Of these, what a file does not say would be the schema's to change.
SECTIONS = ("sampling", "algorithm", "algorithm.correction", "actor.optimizer", "reward.unscored")


def section(job: Job, name: str) -> BaseModel:
    found: Any = job
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, BaseModel)
    return found


@pytest.mark.parametrize("max_lag", LAGS)
@pytest.mark.parametrize("tis", [True, False])
def test_its_job_is_the_one_that_was_measured(max_lag: int, tis: bool) -> None:
    job = Job.model_validate(job_document(steps=7, max_lag=max_lag, tis=tis, seed=2))
    assert (job.steps, job.seed, job.algorithm.max_lag) == (7, 2, max_lag)
    assert job.algorithm.correction.kind == ("tis" if tis else "none")
    assert job.deterministic is False  # lag 0 differs from the others by its lag alone
    assert job.actor.optimizer.warmup_steps == 0
    assert (job.sampling.groups_per_step, job.sampling.samples_per_prompt) == (6, 8)
    assert job.eval is None


@pytest.mark.parametrize("name", SECTIONS)
def test_its_file_leaves_nothing_to_defaults(name: str) -> None:
    job = Job.model_validate(job_document(steps=7, max_lag=0, tis=True, seed=0))
    found = section(job, name)
    left = {
        field
        for field in type(found).model_fields.keys() - found.model_fields_set
        if not isinstance(getattr(found, field), BaseModel | None)
    }
    assert not left


def test_an_effect_has_one_value_a_seed() -> None:
    """Slopes over the lag of -0.01, -0.02, -0.03, and half of that with TIS."""
    runs = [
        Run(lag, tis, seed, [0.9] * 6 + [0.5 - slope * lag * (0.5 if tis else 1)] * 6, [], [], [])
        for seed, slope in enumerate((0.01, 0.02, 0.03))
        for lag in LAGS
        for tis in (True, False)
    ]
    corrected, uncorrected, gain = effects(runs[::-1]).values()
    assert corrected == pytest.approx([-0.005, -0.01, -0.015])
    assert uncorrected == pytest.approx([-0.01, -0.02, -0.03])
    assert gain == pytest.approx([0.5 * slope * 13 / 4 for slope in (0.01, 0.02, 0.03)])
