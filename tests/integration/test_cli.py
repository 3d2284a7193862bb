"""The commands and their client against a trainer-shaped HTTP server that can misbehave."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from typer.testing import CliRunner, Result

from services.cli import watch
from services.cli.commands import app as cli
from services.client import NoSuchJob, TandemClient
from shared.errors import DeadlineExceeded, HttpFailed
from shared.job_answers import JobStatus
from shared.messages import Event

JOB_ID = "demo-1f3a"


def told(name: str, **fields: Any) -> Event:
    return Event(name=name, job_id=JOB_ID, service="trainer", replica="t", at_s=0, fields=fields)


@dataclass
class FakeTrainer:
    """State of the fake; `break_after` cuts the event stream once, after so many lines."""

    url: str = ""
    submitted: list[dict[str, Any]] = field(default_factory=list)
    refusal: list[dict[str, Any]] | None = None
    state: str = "finished"
    events: list[Event] = field(default_factory=list)
    break_after: int | None = None
    unavailable: int = 0
    keys: list[str | None] = field(default_factory=list)
    asked_after: list[int] = field(default_factory=list)
    rolled_back_to: int | None = None
    doing: str | None = None

    def kept(self) -> dict[str, Any]:
        """Two versions; a server follows at once."""
        served = 2 if self.rolled_back_to is None else self.rolled_back_to
        versions = [
            {
                "policy_version": version,
                "is_whole": version == 2,
                "stored_bytes": 1_500_000,
                "base_version": version - 1,
                "effective_checksum": str(version) * 32,
                "servers": ["rollout-0"] if version == served else [],
            }
            for version in (1, 2)
        ]
        return {"current": 2, "rolled_back_to": self.rolled_back_to, "versions": versions}

    def status(self) -> dict[str, Any]:
        status = {
            "job_id": JOB_ID, "name": "demo", "state": self.state, "step": 2, "steps": 2,
            "policy_version": 2, "created_at_s": 1.7e9, "error": None, "wish": None,
            "doing": None, "warnings": [], "counts": {}, "last": {},
        }  # fmt: skip
        return JobStatus.model_validate(status).model_dump()


def fake_app(trainer: FakeTrainer) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/jobs", status_code=201)
    async def submit(request: Request, document: dict[str, Any]) -> dict[str, Any]:
        trainer.keys.append(request.headers.get("idempotency-key"))
        if trainer.unavailable:
            trainer.unavailable -= 1
            raise HTTPException(503, "starting")
        if trainer.refusal:
            raise HTTPException(422, trainer.refusal)
        trainer.submitted.append(document)
        return {"job_id": JOB_ID, "warnings": ["no eval section"]}

    @app.get("/v1/jobs")
    async def jobs() -> dict[str, Any]:
        return {"jobs": [trainer.status()]}

    @app.get("/v1/jobs/{job_id}")
    async def job(job_id: str) -> dict[str, Any]:
        if job_id != JOB_ID:
            raise HTTPException(404, "no such job")
        return trainer.status()

    @app.post("/v1/jobs/{job_id}/{wish}")
    async def ask(job_id: str, wish: str) -> dict[str, Any]:
        if trainer.state == "running":
            return trainer.status() | {"wish": wish, "doing": trainer.doing}
        if trainer.state == "failed" and wish == "pause":
            raise HTTPException(409, f"{job_id} is failed; only a queued or running job can pause")
        trainer.state = {"cancel": "cancelled", "pause": "paused", "resume": "queued"}[wish]
        return trainer.status()

    @app.get("/v1/jobs/{job_id}/weights")
    async def kept(job_id: str) -> dict[str, Any]:
        if job_id != JOB_ID:
            raise HTTPException(404, f"job {job_id} is not in progress")
        return trainer.kept()

    @app.post("/v1/jobs/{job_id}/weights/rollback", status_code=202)
    async def roll_back(job_id: str, body: dict[str, int]) -> dict[str, Any]:
        if body["to"] not in (1, 2):
            raise HTTPException(404, f"version {body['to']} is not kept; kept are [1, 2]")
        trainer.rolled_back_to = None if body["to"] == 2 else body["to"]
        return trainer.kept()

    @app.get("/v1/jobs/{job_id}/events")
    async def events(job_id: str, after: int = 0) -> StreamingResponse:
        if job_id != JOB_ID:
            raise HTTPException(404, "no such job")
        if trainer.unavailable:
            trainer.unavailable -= 1
            raise HTTPException(503, "starting")
        trainer.asked_after.append(after)
        return StreamingResponse(_stream(trainer, after), media_type="text/event-stream")

    return app


async def _stream(trainer: FakeTrainer, after: int) -> AsyncIterator[str]:
    cut, trainer.break_after = trainer.break_after, None
    for line, event in enumerate(trainer.events, start=1):
        if cut is not None and line > cut:
            return
        if line > after:
            yield ": keep-alive\n\n"
            yield f"id: {line}\ndata: {event.model_dump_json()}\n\n"
    yield "event: end\ndata: {}\n\n"


@pytest.fixture
def trainer(free_port: int) -> Iterator[FakeTrainer]:
    fake = FakeTrainer(url=f"http://127.0.0.1:{free_port}")
    config = uvicorn.Config(fake_app(fake), port=free_port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline_s = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline_s:
        time.sleep(0.01)
    yield fake
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('name = "demo"\nsteps = 60\n')
    return path


def call(trainer: FakeTrainer, *argv: str) -> Result:
    return CliRunner().invoke(cli, [*argv, "--trainer", trainer.url])


def two_steps() -> list[Event]:
    return [
        told("job_started", job={"steps": 2}),
        told("step", step=1, reward_raw=0.25),
        told("step", step=2, reward_raw=0.5),
        told("job_finished", state="finished"),
    ]


def test_submit_sends_the_job_with_its_changes(trainer: FakeTrainer, job_file: Path) -> None:
    result = call(trainer, "submit", str(job_file), "--set", "steps=2", "--set", "data.path=x")
    assert result.exit_code == 0
    assert result.stdout.strip() == JOB_ID
    assert "no eval section" in result.stderr
    assert trainer.submitted == [{"name": "demo", "steps": 2, "data": {"path": "x"}}]


def test_a_submission_asked_again_is_the_same_one(trainer: FakeTrainer, job_file: Path) -> None:
    trainer.unavailable = 1
    assert call(trainer, "submit", str(job_file)).exit_code == 0
    first, second = trainer.keys
    assert first == second is not None


def test_a_refused_job_names_key_value_and_what_is_allowed(
    trainer: FakeTrainer, job_file: Path
) -> None:
    trainer.refusal = [
        {"key": "reward.grader", "value": "maths", "message": "unknown", "allowed": ["math"]},
        {"key": "stepz", "value": 3, "message": "no such key"},
    ]
    result = call(trainer, "submit", str(job_file))
    assert result.exit_code == 1
    assert 'reward.grader = "maths": unknown (allowed: math)' in result.stderr
    assert "stepz = 3: no such key" in result.stderr


def test_watch_prints_a_line_a_step_and_takes_up_a_broken_stream(trainer: FakeTrainer) -> None:
    trainer.events, trainer.break_after, trainer.unavailable = two_steps(), 2, 1
    result = call(trainer, "watch", JOB_ID)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        JOB_ID,
        "step",
        "step",
        JOB_ID,
    ]
    assert trainer.asked_after == [0, 2]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_watch_of_a_job_that_did_not_finish_fails(trainer: FakeTrainer, state: str) -> None:
    trainer.state = state
    trainer.events = [told("job_finished", state=state, error="rank 0 died")]
    result = call(trainer, "watch", JOB_ID)
    assert result.exit_code == 1
    assert "rank 0 died" in result.stdout


def test_watch_as_json_prints_the_events(trainer: FakeTrainer) -> None:
    trainer.events = two_steps()
    lines = call(trainer, "watch", JOB_ID, "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == [e.name for e in trainer.events]


def test_submit_and_watch(trainer: FakeTrainer, job_file: Path) -> None:
    trainer.events = two_steps()
    result = call(trainer, "submit", str(job_file), "--watch")
    assert result.exit_code == 0
    assert "step    2/2" in result.stdout


def test_status_lists_jobs_and_shows_one(trainer: FakeTrainer) -> None:
    assert JOB_ID in call(trainer, "status").stdout
    assert json.loads(call(trainer, "status", "--json").stdout)[0]["state"] == "finished"
    assert json.loads(call(trainer, "status", JOB_ID, "--json").stdout)["step"] == 2


def test_an_unknown_job_is_one_sentence(trainer: FakeTrainer) -> None:
    for command in ("status", "watch"):
        result = call(trainer, command, "other-0000")
        assert result.exit_code == 1
        assert result.stderr == "the trainer knows no job other-0000\n"


@pytest.mark.parametrize(
    ("wish", "follows"),
    [("cancel", "will be cancelled"), ("pause", "will be paused once the step")],
)
def test_a_wish_says_what_was_asked_and_which_state_follows(
    trainer: FakeTrainer, wish: str, follows: str
) -> None:
    trainer.state = "running"
    for trainer.doing, now in ((None, "running"), ("training step 2", "training step 2")):
        said = call(trainer, wish, JOB_ID).stdout
        assert said.startswith(f"asked {JOB_ID} to {wish}: it is {now}, and {follows}")
    assert json.loads(call(trainer, wish, JOB_ID, "--json").stdout)["wish"] == wish


def test_a_resumed_job_is_queued_and_a_refused_wish_is_told_in_words(trainer: FakeTrainer) -> None:
    trainer.state = "paused"
    said = call(trainer, "resume", JOB_ID).stdout
    assert said.startswith(f"{JOB_ID} is queued: it continues after step 2")
    trainer.state = "failed"
    refused = call(trainer, "pause", JOB_ID)
    assert refused.exit_code == 1
    assert refused.stderr.endswith(
        f"409: {JOB_ID} is failed; only a queued or running job can pause\n"
    )


def test_watch_says_at_once_that_nobody_answers(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SILENT_S", 0.05)
    monkeypatch.setattr(watch, "PATIENCE_S", 4.0)
    url = f"http://127.0.0.1:{free_port}"
    result = CliRunner().invoke(cli, ["watch", JOB_ID, "--trainer", url])
    assert result.exit_code == 1
    first, last = result.stderr.splitlines()
    assert first == f"No trainer answers at {url}: trying for 4 s more."
    assert last.startswith(f"No trainer answers GET {url}/v1/jobs/{JOB_ID}: start one with")


def test_cancel(trainer: FakeTrainer) -> None:
    assert call(trainer, "cancel", JOB_ID).stdout == f"{JOB_ID} is cancelled\n"
    assert trainer.state == "cancelled"


async def test_without_a_trainer_requests_and_streams_end_in_time(free_port: int) -> None:
    async with TandemClient(f"http://127.0.0.1:{free_port}", patience_s=1.0) as client:
        with pytest.raises(HttpFailed) as failed:
            await client.jobs()
        assert failed.value.status is None
        with pytest.raises(DeadlineExceeded, match="waited 1 s"):
            async for _ in client.events(JOB_ID):
                pass


async def test_the_client_names_a_job_that_is_not_there(trainer: FakeTrainer) -> None:
    async with TandemClient(trainer.url) as client:
        with pytest.raises(NoSuchJob, match="other-0000"):
            await asyncio.wait_for(anext(client.events("other-0000")), 60)


def test_kept_versions_are_listed_and_rolled_back_to(trainer: FakeTrainer) -> None:
    listed = call(trainer, "weights", "list", JOB_ID)
    assert listed.exit_code == 0
    assert "changes of 0" in listed.stdout
    assert "2 (to serve)" in listed.stdout
    there = call(trainer, "weights", "rollback", JOB_ID, "--to", "1")
    assert (there.exit_code, there.stdout) == (0, "version 1 is served by rollout-0\n")
    assert "1 (to serve)" in call(trainer, "weights", "list", JOB_ID).stdout
    back = call(trainer, "weights", "rollback", JOB_ID, "--to", "2")
    assert (back.exit_code, trainer.rolled_back_to) == (0, None)
    as_json = call(trainer, "weights", "list", JOB_ID, "--json").stdout
    assert json.loads(as_json)["versions"][1]["servers"] == ["rollout-0"]


def test_a_version_or_a_job_that_is_not_there_is_one_sentence(trainer: FakeTrainer) -> None:
    gone = call(trainer, "weights", "rollback", JOB_ID, "--to", "77")
    assert (gone.exit_code, gone.stderr.strip()) == (1, "version 77 is not kept; kept are [1, 2]")
    other = call(trainer, "weights", "list", "other-0000")
    assert (other.exit_code, other.stderr.strip()) == (1, "job other-0000 is not in progress")
