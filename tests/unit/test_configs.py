"""The job files that ship are jobs: every key known, every value within its bounds."""

from pathlib import Path

import pytest

from shared.job import Job, load_job_file

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def load(name: str) -> Job:
    path = next(path for path in CONFIGS if path.stem == name)
    return Job.model_validate(load_job_file(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_job_is_valid_and_evaluates(path: Path) -> None:
    job = Job.model_validate(load_job_file(path))
    assert job.warnings == []


def test_the_demo_is_the_job_that_the_readme_describes() -> None:
    job = load("demo")
    assert (job.steps, job.sampling.groups_per_step, job.sampling.samples_per_prompt) == (60, 16, 8)
    assert job.eval is not None
    assert job.eval.every_steps == 10


def test_the_real_data_job_takes_its_files_from_data_root() -> None:
    job = load("real-data")
    assert job.eval is not None
    assert job.steps == 2
    paths = [job.data.path, job.eval.data.path]
    assert all(path is not None and path.startswith("$DATA_ROOT/") for path in paths)
