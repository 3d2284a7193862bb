"""The tracking process with the real libraries: nothing leaves the run folder, nobody stays."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from services.trainer.jobs.abilities import lacking
from services.trainer.jobs.submission import Refused, check_abilities
from services.trainer.tracking.follow import follow, numbers_to_tell
from services.trainer.tracking.process import tracking
from shared.job_cluster import TrackingSection
from shared.messages import Event
from tests.integration.conductor_world import make_job

ROOT = Path(__file__).parents[2]


def add(run_dir: Path, name: str, **fields: Any) -> None:
    event = Event(name=name, job_id="j", service="trainer", replica="t", at_s=100.0, fields=fields)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(event.model_dump_json() + "\n")


def step(run_dir: Path, number: int) -> None:
    add(run_dir, "step", step=number, reward_raw=0.5 * number, seconds={"wait": 1.0})


def evaluation(run_dir: Path, number: int) -> None:
    pass_at_k = {"1": 0.25, "8": 0.5}
    add(run_dir, "eval_finished", suite="sums", step=number, policy_version=1, pass_at_k=pass_at_k)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "job-1a2b"
    folder.mkdir(parents=True)
    return folder


def write_job(run_dir: Path, **sections: Any) -> Any:
    job = make_job(tracking=sections)
    (run_dir / "job.json").write_text(job.model_dump_json())
    return job


def tracked(run_dir: Path, home: Path) -> None:
    """As by hand after a job, with a home of its own to see what lands there."""
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(home / "tmp")}
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer.tracking", str(run_dir)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, dict[int, float]] = {}
    for path in sorted((run_dir / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    return found


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_tensorboard_gets_every_number_once(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_job(run_dir, tensorboard=True)
    step(run_dir, 1)
    evaluation(run_dir, 1)
    tracked(run_dir, tmp_path / "home")
    step(run_dir, 2)
    tracked(run_dir, tmp_path / "home")  # goes on where it was
    found = scalars(run_dir)
    assert found["train/reward_raw"] == {1: 0.5, 2: 1.0}
    assert found["train/seconds/wait"] == {1: 1.0, 2: 1.0}
    assert found["eval/sums/pass_at_k/8"] == {1: 0.5}
    assert files_under(tmp_path / "home") == []


def test_wandb_offline_keeps_all_in_the_run_folder_and_leaves_no_process(
    run_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    write_job(run_dir, wandb={"project": "p"})
    step(run_dir, 1)
    evaluation(run_dir, 1)
    before = {one.pid for one in psutil.process_iter()}
    tracked(run_dir, tmp_path / "home")
    mark = str(run_dir)
    for one in psutil.process_iter(["cmdline", "environ"]):
        if one.pid not in before:
            assert mark not in " ".join(one.info["cmdline"] or []), one
            assert "wandb" not in " ".join(one.info["cmdline"] or []), one
    (kept,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    body = kept.read_bytes()
    assert b"train/reward_raw" in body
    assert b"eval/sums/pass_at_k/1" in body
    assert files_under(tmp_path / "home") == []


async def test_the_process_lives_as_long_as_the_job_and_writes_its_last_line(run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    job = write_job(run_dir, tensorboard=True)
    async with tracking(job.tracking, run_dir):
        step(run_dir, 1)
        async with asyncio.timeout(30):
            while not (run_dir / "tracking.json").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        step(run_dir, 2)
    assert json.loads((run_dir / "tracking.json").read_text()) == {"line": 2}
    assert scalars(run_dir)["train/reward_raw"] == {1: 0.5, 2: 1.0}
    marked = [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(run_dir) in (one.info["cmdline"] or [])
    ]
    assert not marked


async def test_a_job_without_it_starts_nothing(run_dir: Path) -> None:
    async with tracking(make_job().tracking, run_dir):
        pass
    assert files_under(run_dir) == []


def test_a_line_is_handed_on_once_however_often_it_is_followed(run_dir: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def write(self, step: int, numbers: Any, at_s: float) -> None:
            self.steps.append(step)

        def flush(self) -> None:
            return None

        def close(self) -> None:
            return None

    kept = Kept()
    for number in (1, 2, 3):
        step(run_dir, number)
        follow(run_dir, [kept], wait=lambda: False)
    assert kept.steps == [1, 2, 3]


def test_events_without_numbers_tell_nothing() -> None:
    assert numbers_to_tell({"name": "job_started", "fields": {}}) is None


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_missing_library_is_told_at_submission(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.jobs.abilities.find_spec", lambda name: None)
    wanted = {"tensorboard": True} if library == "tensorboard" else {"wandb": {}}
    with pytest.raises(Refused) as refused:
        check_abilities(make_job(tracking=wanted))
    (problem,) = refused.value.problems
    assert problem.key == f"tracking.{library}"
    assert "pip install -r requirements/tracking.txt" in problem.message


def test_sending_without_a_key_is_told_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    job = make_job(tracking={"wandb": {"mode": "online"}})
    assert ["WANDB_API_KEY" in reason for _, _, reason in lacking(job)] == [True]
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert lacking(job) == []


async def test_a_tracker_that_cannot_start_is_no_harm(tmp_path: Path) -> None:
    """The log cannot be opened: the job goes on, and what to do later is said."""
    run_dir = tmp_path / "never-made"
    with structlog.testing.capture_logs() as told:
        async with tracking(TrackingSection(tensorboard=True), run_dir):
            pass
    (warning,) = told
    assert warning["event"] == "tracking_not_started"
    assert f"services.trainer.tracking {run_dir}" in warning["hint"]
