"""The trainer's application with fake ranks: submissions, the queue, and every route."""

import asyncio
import contextlib
import errno
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import pytest_asyncio
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from redis.asyncio import Redis
from tokenizers import Tokenizer, models, pre_tokenizers

from services.trainer.app import create_app, workers
from services.trainer.books import Books
from services.trainer.collector import Collector
from services.trainer.conductor import Conductor
from services.trainer.config import ConductorConfig, TrainerConfig
from services.trainer.disk import Unwritable
from services.trainer.jobs import reports, runner
from services.trainer.jobs.store import JobStore, StoredJob
from services.trainer.keeper import RankKeeper, StartRanks, StepRefused
from services.trainer.recording import RECORDING_FILE, Recording
from services.trainer.rollback import NOTE
from services.trainer.steps import EndState
from shared import topology
from shared.data import hub
from shared.job_answers import RunOverview
from shared.messages import JobAnnounced
from shared.parity.trace import Traced, TraceRequest
from shared.registry import Replica, live_replicas, register
from shared.tasks import end
from tests.integration.conductor_world import FakeRanks
from tests.served import served


@dataclass
class Trainer:
    app: FastAPI
    http: httpx.AsyncClient
    root: Path
    refuse: set[int] = field(default_factory=set)

    def document(self, **changes: Any) -> dict[str, Any]:
        return {
            "name": "test",
            "steps": 2,
            "model": {"rollout_checkpoint": str(self.root / "policy")},
            "data": {"path": str(self.root / "rows.jsonl")},
            "sampling": {"context_length": 32, "max_response_tokens": 8},
            "preflight": {"enabled": False},
            **changes,
        }

    async def submit(self, **changes: Any) -> str:
        answer = await self.http.post("/v1/jobs", json=self.document(**changes))
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]

    async def until_ok(self, method: str, route: str, **body: Any) -> httpx.Response:
        async with asyncio.timeout(60):
            while True:
                answer = await self.http.request(method, route, **body)
                if answer.status_code == 200:
                    return answer
                await asyncio.sleep(0.05)

    async def until_state(self, job_id: str, state: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                status = (await self.http.get(f"/v1/jobs/{job_id}")).json()
                if status["state"] == state:
                    return status
                await asyncio.sleep(0.05)

    async def until_error(self, job_id: str, part: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                status = (await self.http.get(f"/v1/jobs/{job_id}")).json()
                if part in (status["error"] or ""):
                    return status
                await asyncio.sleep(0.05)


def make_policy(path: Path) -> None:
    path.mkdir()
    vocab = {chr(i): i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (path / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": 1}))


@contextlib.asynccontextmanager
async def running(config: TrainerConfig, root: Path) -> AsyncIterator[Trainer]:
    """The application with its workers; leaving stops it as SIGTERM would."""
    refuse: set[int] = set()

    def begin(job: StoredJob, run_dir: Path) -> StartRanks:
        async def start() -> FakeRanks:
            return FakeRanks([], [], refuse)

        return start

    app = create_app(config, begin_ranks=begin)
    stop = asyncio.Event()
    async with app.router.lifespan_context(app):
        tasks = [asyncio.create_task(worker(stop)) for worker in workers(app, config)]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as http:
            try:
                yield Trainer(app, http, root, refuse)
            finally:
                stop.set()
                await asyncio.wait(tasks, timeout=10)
        for task in tasks:
            if task.done():
                task.result()
            await end(task)


async def until_key(redis: Redis, key: str) -> None:
    async with asyncio.timeout(60):
        while not await redis.exists(key):  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.05)


async def until_expiring(redis: Redis, key: str) -> None:
    """A key that is there for good has a time to live of -1."""
    async with asyncio.timeout(60):
        while await redis.ttl(key) < 0:  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.05)


@pytest.fixture
def config(tmp_path: Path, redis_url: str, redis: Redis) -> TrainerConfig:
    return make_config(tmp_path, redis_url)


def make_config(tmp_path: Path, redis_url: str) -> TrainerConfig:
    make_policy(tmp_path / "policy")
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(8)]
    lines = [json.dumps({"problem": row["prompt"], "answer": row["label"]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return TrainerConfig(
        redis_url=redis_url,
        replica="trainer-0",
        runs_dir=tmp_path / "runs",
        data_roots=(tmp_path,),
        conductor=ConductorConfig(goodbye_s=3.0),
    )


@pytest_asyncio.fixture
async def trainer(config: TrainerConfig, tmp_path: Path) -> AsyncIterator[Trainer]:
    async with running(config, tmp_path) as trainer:
        yield trainer


WRONG = [
    ({"seps": 2}, "seps", 2, "did you mean steps?", "steps"),
    ({"steps": 0}, "steps", 0, "greater than 0", None),
    ({"steps": True}, "steps", True, "integer", None),
    ({"seed": 2**63}, "seed", 2**63, "less than", None),
    ({"steps": "many"}, "steps", "many", "integer", None),
    ({"name": "No Spaces"}, "name", "No Spaces", "pattern '^[a-z", None),
    ({"sampling": {"context_length": 32}}, "sampling.max_response_tokens", None, "required", None),
    (
        {"sampling": {"context_length": 32, "max_response_tokens": 8, "top_pp": 1}},
        "sampling.top_pp",
        1,
        "did you mean top_p?",
        "top_k",
    ),
    ({"data": {}}, "data", "{}", "either path or dataset", None),
    ({"data": {"path": "x", "format": "xml"}}, "data.format", "xml", "'gsm8k'", None),
    ({"data": {"path": "/etc/passwd"}}, "data.path", "/etc/passwd", "outside the data roots", "/"),
    ({"data": {"path": "$NOT_SET/x"}}, "data.path", "$NOT_SET/x", "not set", None),
    ({"model": {"rollout_checkpoint": "/etc"}}, "model.rollout_checkpoint", "/etc", "outside", "/"),
    ({"data": {"path": "README.mdx"}}, "data.path", None, "README.mdx", None),
    ({"actor": {"precision": "fp4"}}, "actor.precision", "fp4", "'dtype' or 'fp8'", None),
    (
        {"model": {"rollout_checkpoint": "assets"}},
        "model.rollout_checkpoint",
        "assets",
        "config",
        None,
    ),
]


@pytest.mark.parametrize(("changes", "key", "value", "message", "allowed"), WRONG)
async def test_wrong_document_is_refused_by_key(
    trainer: Trainer, changes: dict, key: str, value: Any, message: str, allowed: str | None
) -> None:
    answer = await trainer.http.post("/v1/jobs", json=trainer.document(**changes))
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["key"] == key
    assert value is None or problem["value"] == value
    assert message in problem["message"]
    if allowed is None:
        assert "allowed" not in problem  # the message says all; people read it once
    else:
        assert allowed in str(problem["allowed"])
    assert (await trainer.http.get("/v1/jobs")).json() == {"jobs": []}


@pytest.mark.parametrize("temperature", ["NaN", "Infinity", "1e999"])
async def test_number_that_json_lacks_is_refused(trainer: Trainer, temperature: str) -> None:
    sampling = {"context_length": 32, "max_response_tokens": 8, "temperature": "here"}
    body = json.dumps(trainer.document(sampling=sampling)).replace('"here"', temperature)
    json_type = {"content-type": "application/json"}
    answer = await trainer.http.post("/v1/jobs", content=body, headers=json_type)
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["key"] == "sampling.temperature"
    assert problem["value"] in ("nan", "inf")
    assert (await trainer.http.get("/v1/jobs")).json() == {"jobs": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n', "rows.jsonl, line 2"),
        ('{"problem": "1+1=", "answer": "2"}\nnot json\n', "rows.jsonl, line 2"),
    ],
)
async def test_bad_data_is_refused_by_file_and_line(
    trainer: Trainer, content: str, message: str
) -> None:
    (trainer.root / "rows.jsonl").write_text(content)
    answer = await trainer.http.post("/v1/jobs", json=trainer.document())
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["key"] == "data.path"
    assert message in problem["message"]


async def test_link_out_of_the_data_roots_is_refused(trainer: Trainer) -> None:
    (trainer.root / "link.jsonl").symlink_to("/etc/hostname")
    data = {"path": str(trainer.root / "link.jsonl")}
    answer = await trainer.http.post("/v1/jobs", json=trainer.document(data=data))
    assert answer.status_code == 422
    assert "outside the data roots" in answer.json()["detail"][0]["message"]


async def test_a_recording_that_is_none_is_refused(trainer: Trainer) -> None:
    (trainer.root / "recording.sqlite").write_bytes(b"garbage" * 1000)
    document = trainer.document(mode="train_only", recording=str(trainer.root))
    answer = await trainer.http.post("/v1/jobs", json=document)
    (problem,) = answer.json()["detail"]
    assert (answer.status_code, problem["key"]) == (422, "recording")
    assert "is no recording: file is not a database" in problem["message"]


async def test_cut_checkpoint_is_refused(trainer: Trainer) -> None:
    (trainer.root / "policy" / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"{}")
    answer = await trainer.http.post("/v1/jobs", json=trainer.document())
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["key"] == "model.rollout_checkpoint"
    assert "model.safetensors is no safetensors file" in problem["message"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"\ud800": 1}, "the document"),
        ({"seed": "\ud800"}, "seed"),
        ({"data": {"path": "x", "prompt_template": "\ud800{problem}"}}, "data.prompt_template"),
    ],
)
async def test_half_a_character_is_refused(
    trainer: Trainer, changes: dict[str, Any], key: str
) -> None:
    body = json.dumps(trainer.document(**changes))
    json_type = {"content-type": "application/json"}
    answer = await trainer.http.post("/v1/jobs", content=body, headers=json_type)
    assert answer.status_code == 422
    assert [problem["key"] for problem in answer.json()["detail"]] == [key]


@pytest.mark.parametrize("body", [b"{", b"[]", b'"job"', b""])
async def test_body_that_is_no_document_is_refused(trainer: Trainer, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await trainer.http.post("/v1/jobs", content=body, headers=headers)
    assert answer.status_code == 422
    assert {"key", "value", "message"} <= set(answer.json()["detail"][0])


async def test_oversized_document_is_refused(trainer: Trainer) -> None:
    answer = await trainer.http.post("/v1/jobs", json={"name": "x" * 2**20})
    assert answer.status_code == 413


async def test_a_jobs_warnings_are_in_the_answer_and_in_its_status(trainer: Trainer) -> None:
    sampling = {"context_length": 32, "max_response_tokens": 8, "top_p": 0.9}
    answer = await trainer.http.post("/v1/jobs", json=trainer.document(sampling=sampling))
    told = answer.json()["warnings"]
    assert [warning.partition(":")[0] for warning in told] == [
        "no eval section",
        "sampling.top_p 0.9",
    ]
    status = await trainer.http.get(f"/v1/jobs/{answer.json()['job_id']}")
    assert status.json()["warnings"] == told


async def test_repeated_submission_with_a_key_is_one_job(trainer: Trainer) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = [
        await trainer.http.post("/v1/jobs", json=trainer.document(), headers=headers)
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    other = await trainer.http.post("/v1/jobs", json=trainer.document(steps=9), headers=headers)
    assert other.status_code == 409
    assert len((await trainer.http.get("/v1/jobs")).json()["jobs"]) == 1


async def test_a_submission_is_repeated_although_its_files_are_gone(trainer: Trainer) -> None:
    """The job is there; what became of its files since is not asked."""
    headers, document = {"Idempotency-Key": "k1"}, trainer.document()
    first = await trainer.http.post("/v1/jobs", json=document, headers=headers)
    (trainer.root / "rows.jsonl").rename(trainer.root / "moved.jsonl")
    again = await trainer.http.post("/v1/jobs", json=document, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    other = await trainer.http.post("/v1/jobs", json=document | {"steps": 9}, headers=headers)
    assert other.status_code == 409
    new = await trainer.http.post("/v1/jobs", json=document, headers={"Idempotency-Key": "k2"})
    assert new.status_code == 422


async def test_jobs_run_one_after_the_other(trainer: Trainer, redis: Redis) -> None:
    """No server is there, so the first job waits until it is cancelled."""
    first, second = [await trainer.submit() for _ in range(2)]
    status = await trainer.until_state(first, "running")
    assert (status["step"], status["steps"], status["policy_version"]) == (0, 2, 0)
    assert (await trainer.http.get(f"/v1/jobs/{second}")).json()["state"] == "queued"
    await until_key(redis, topology.JOB_CURRENT)
    announced = JobAnnounced.unpack(await redis.get(topology.JOB_CURRENT))
    assert (announced.job_id, announced.state) == (first, "active")
    assert announced.job["data"]["path"] == str(trainer.root / "rows.jsonl")
    await trainer.http.post(f"/v1/jobs/{first}/cancel")
    await trainer.until_state(first, "cancelled")
    await trainer.until_state(second, "running")
    (replica,) = await live_replicas(redis, "trainer")
    assert replica.name == "trainer-0"


async def test_waiting_job_is_paused_resumed_and_cancelled(trainer: Trainer) -> None:
    first, second = [await trainer.submit() for _ in range(2)]
    await trainer.until_state(first, "running")
    for action, state in [("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")]:
        answer = await trainer.http.post(f"/v1/jobs/{second}/{action}")
        assert (answer.status_code, answer.json()["state"]) == (200, state)
    again = await trainer.http.post(f"/v1/jobs/{second}/resume")
    assert again.status_code == 409
    assert "is cancelled" in again.json()["detail"]


async def test_running_job_is_paused_and_resumed(trainer: Trainer) -> None:
    job_id = await trainer.submit()
    await trainer.until_state(job_id, "running")
    await trainer.http.post(f"/v1/jobs/{job_id}/pause")
    status = await trainer.until_state(job_id, "paused")
    assert status["error"] == "paused on request"
    await trainer.http.post(f"/v1/jobs/{job_id}/resume")
    await trainer.until_state(job_id, "running")


async def test_a_stopped_job_goes_on_on_another_layout(trainer: Trainer) -> None:
    """How it is spread may change, once it stands; what it learns, and what does not fit, not."""
    job_id = await trainer.submit()
    await trainer.until_state(job_id, "running")
    spread = {
        "cluster": {"actor_nodes": 1},
        "actor": {"max_tokens_per_gpu": 4096, "optimizer": {"offload": {"fraction": 0.5}}},
    }
    resume = f"/v1/jobs/{job_id}/resume"
    early = await trainer.http.post(resume, json=spread)
    assert (early.status_code, "paused or failed" in early.text) == (409, True)
    await trainer.http.post(f"/v1/jobs/{job_id}/pause")
    await trainer.until_state(job_id, "paused")
    for changes, key, told in [
        ({"actor": {"optimizer": {"learning_rate": 1.0}}}, "actor.optimizer.learning_rate", "keep"),
        ({"steps": 9}, "steps", "actor.parallel"),
        ({"actor": {"parallel": {"expert": 3}}}, "", "expert 3"),
    ]:
        refused = await trainer.http.post(resume, json=changes)
        assert refused.status_code == 422
        assert key in refused.json()["detail"][0]["key"]
        assert told in refused.text
    answer = await trainer.http.post(resume, json=spread)
    assert answer.status_code == 200, answer.text
    await trainer.until_state(job_id, "running")
    job = json.loads((trainer.root / "runs" / job_id / "job.json").read_text())
    assert job["actor"]["max_tokens_per_gpu"] == 4096
    assert job["actor"]["optimizer"]["offload"] == {"fraction": 0.5, "overlap": True}
    assert job["steps"] == 2
    assert (len(job["actor"]["kernels"]), set(job["actor"]["kernels"].values())) == (7, {"torch"})


async def test_the_report_of_a_paused_job_says_so_when_it_is_cancelled(trainer: Trainer) -> None:
    job_id = await trainer.submit()
    await trainer.until_state(job_id, "running")
    asked = (await trainer.http.post(f"/v1/jobs/{job_id}/pause")).json()
    assert (asked["state"], asked["wish"]) == ("running", "pause")
    assert (await trainer.until_state(job_id, "paused"))["wish"] is None
    page = (await trainer.http.get(f"/v1/jobs/{job_id}/report")).text
    assert "The job is paused" in page
    await trainer.http.post(f"/v1/jobs/{job_id}/cancel")
    page = (await trainer.http.get(f"/v1/jobs/{job_id}/report")).text
    assert "The job is cancelled" in page
    assert (await trainer.http.get(f"/v1/jobs/{job_id}/summary")).json()["state"] == "cancelled"


async def test_the_summary_of_a_running_job_is_as_new_as_its_report(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "AGE_S", 0.0)
    job_id = await trainer.submit()
    summary = await trainer.until_ok("GET", f"/v1/jobs/{job_id}/summary")
    assert summary.json()["state"] == "unfinished"
    parts = trainer.app.state.runner.active.parts
    parts.record.note(parts.events("pairs_skipped", number=3, limit=5))
    summary = await trainer.http.get(f"/v1/jobs/{job_id}/summary")
    assert any("3 warm-up pairs were skipped" in one for one in summary.json()["warnings"])
    await trainer.http.post(f"/v1/jobs/{job_id}/cancel")
    await trainer.until_state(job_id, "cancelled")
    summary = await trainer.http.get(f"/v1/jobs/{job_id}/summary")
    assert summary.json()["state"] == "cancelled"


@pytest.fixture
def endless_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From the second time on a data set is downloaded for ever; the file has the child's id."""
    pid = tmp_path / "pid"
    body = (
        "import os, pathlib, sys, time\n"
        f"pid = pathlib.Path({str(pid)!r})\n"
        "if not (first := pid.with_name('first')).exists():\n"
        "    first.touch()\n"
        '    row = \'{"problem": "1+1=", "answer": "2"}\'\n'
        "    pathlib.Path(sys.argv[-1]).write_text(row)\n"
        "    sys.exit()\n"
        "pid.write_text(str(os.getpid()))\n"
        "time.sleep(120)\n"
    )
    (tmp_path / "hub.py").write_text(body)
    monkeypatch.setattr(hub, "COMMAND", [sys.executable, str(tmp_path / "hub.py")])
    return pid


def number_in(path: Path) -> int | None:
    return int(path.read_text() or "0") or None if path.exists() else None


@pytest.mark.parametrize(
    ("wish", "state"), [("pause", "paused"), ("cancel", "cancelled"), ("", "running")]
)
async def test_a_job_is_left_while_its_data_set_is_downloaded(
    config: TrainerConfig, tmp_path: Path, endless_hub: Path, wish: str, state: str
) -> None:
    """On request, or since the trainer is stopped: at once, and the child is gone."""
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit(data={"dataset": "owner/name"})
        async with asyncio.timeout(60):
            while (child := number_in(endless_hub)) is None:  # noqa: ASYNC110  another process's doing
                await asyncio.sleep(0.02)
        status = (await trainer.http.get(f"/v1/jobs/{job_id}")).json()
        assert (status["state"], status["doing"]) == ("running", "reading data set owner/name")
        if wish:
            await trainer.http.post(f"/v1/jobs/{job_id}/{wish}")
            status = await trainer.until_state(job_id, state)
            assert (status["error"], status["doing"]) == (f"{state} on request", None)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    store = JobStore(config.runs_dir)
    assert (store.get(job_id).state, store.get(job_id).attempts) == (state, 0)
    store.close()


@pytest.mark.parametrize("error", ["sqlite", "file"])
async def test_a_job_that_meets_a_full_disk_pauses_once_that_can_be_stored(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Nor does its queue, on the same disk, take anything at first; then the job goes on."""
    ends: list[str] = []
    end_job, note = JobStore.end, Books.note_event

    def end_later(store: JobStore, job_id: str, *outcome: Any) -> None:
        ends.append(job_id)
        if len(ends) < 3:
            raise Unwritable.at(config.runs_dir, OSError("full"))
        end_job(store, job_id, *outcome)

    def fail(books: Books, *event: Any) -> None:
        if error == "file":
            raise OSError(errno.ENOSPC, "No space left on device", str(books.path))
        limited(books._db)
        books.keep_note("large", "x" * 100_000)

    monkeypatch.setattr(runner, "SPACE_POLL_S", 0.02)
    monkeypatch.setattr(JobStore, "end", end_later)
    monkeypatch.setattr(Books, "note_event", fail)
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        status = await trainer.until_state(job_id, "paused")
        path = config.runs_dir / job_id / "books.sqlite"
        assert status["error"].startswith(f"{path} cannot be written: ")
        assert "bytes are free there" in status["error"]
        assert len(ends) == 3
        monkeypatch.setattr(Books, "note_event", note)
        await trainer.http.post(f"/v1/jobs/{job_id}/resume")
        await until_started(config.runs_dir / job_id, times=1)
        assert (await trainer.until_state(job_id, "running"))["error"] is None


async def test_what_a_full_disk_cannot_take_is_answered_with_its_place(trainer: Trainer) -> None:
    limited(trainer.app.state.store._db)
    data = {"path": str(trainer.root / "rows.jsonl"), "prompt_template": "{problem}" + "x" * 50_000}
    answer = await trainer.http.post("/v1/jobs", json=trainer.document(data=data))
    assert answer.status_code == 507, answer.text
    assert "jobs.sqlite cannot be written: database or disk is full (" in answer.json()["detail"]


def limited(db: sqlite3.Connection) -> None:
    """Not a page more, as if the disk were full."""
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")


@dataclass
class Held:
    """Something of the job that stays where it is until it is let go."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self) -> None:
        self.reached.set()
        await self.go_on.wait()


@pytest.fixture
def held_close(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The conductor has obeyed and is closing."""
    held, close = Held(), Conductor.close

    async def slowly(conductor: Conductor, ended: EndState | None, **error: Any) -> None:
        await held.hold()
        await close(conductor, ended, **error)

    monkeypatch.setattr(Conductor, "close", slowly)
    return held


@pytest.fixture
def held_worker(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The conductor has obeyed, and waits for one of its loops to return."""
    held, run = Held(), Collector.run

    async def slowly(collector: Collector, stop: asyncio.Event) -> None:
        await run(collector, stop)
        await held.hold()

    monkeypatch.setattr(Collector, "run", slowly)
    return held


@pytest.mark.parametrize("where", ["held_close", "held_worker"])
async def test_a_job_that_is_still_pausing_is_resumed(
    config: TrainerConfig, tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    """The job is taken up again, and no resume is lost."""
    held: Held = request.getfixturevalue(where)
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await trainer.until_state(job_id, "running")
        await until_key(trainer.app.state.redis, topology.weights_current(job_id))
        conductor = trainer.app.state.runner.active
        await trainer.http.post(f"/v1/jobs/{job_id}/pause")
        await asyncio.wait_for(held.reached.wait(), 60)
        answer = await trainer.http.post(f"/v1/jobs/{job_id}/resume")
        assert (answer.status_code, answer.json()["state"]) == (200, "running")
        if where == "held_worker":
            await until_clear(conductor.pause_asked)
        held.go_on.set()
        await until_started(trainer.root / "runs" / job_id, times=2)
        assert (await trainer.http.get(f"/v1/jobs/{job_id}")).json()["state"] == "running"


async def test_a_cancel_that_overtakes_a_pause_is_told(
    config: TrainerConfig, redis: Redis, tmp_path: Path, held_close: Held
) -> None:
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await until_key(redis, topology.weights_current(job_id))
        await trainer.http.post(f"/v1/jobs/{job_id}/pause")
        await asyncio.wait_for(held_close.reached.wait(), 60)
        asked = (await trainer.http.post(f"/v1/jobs/{job_id}/cancel")).json()
        assert (asked["state"], asked["wish"]) == ("running", "cancel")
        held_close.go_on.set()
        await trainer.until_state(job_id, "cancelled")
        await until_expiring(redis, topology.weights_current(job_id))
        await until_summary(trainer, job_id, "cancelled")
        record = trainer.root / "runs" / job_id / "events.jsonl"
        events = map(json.loads, record.read_text().splitlines())
        ends = [one["fields"]["state"] for one in events if one["name"] == "job_finished"]
        assert ends == ["paused", "cancelled"]


async def until_clear(event: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        while event.is_set():  # noqa: ASYNC110  the runner looks now and then
            await asyncio.sleep(0.01)


async def until_summary(trainer: Trainer, job_id: str, state: str) -> None:
    """The report is written after the job has its state."""
    async with asyncio.timeout(60):
        summary = f"/v1/jobs/{job_id}/summary"
        while (await trainer.http.get(summary)).json().get("state") != state:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_started(run_dir: Path, *, times: int) -> None:
    async with asyncio.timeout(20):
        while (run_dir / "events.jsonl").read_text().count('"job_started"') < times:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_job_in_progress_is_taken_up_by_the_next_process(
    config: TrainerConfig, tmp_path: Path
) -> None:
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await trainer.until_state(job_id, "running")
    async with running(config, tmp_path) as trainer:
        await trainer.until_state(job_id, "running")
        lines = (config.runs_dir / job_id / "events.jsonl").read_text().splitlines()
        assert [json.loads(line)["name"] for line in lines].count("job_started") <= 2


async def test_job_that_cannot_be_taken_up_again_is_over_for_everybody(
    config: TrainerConfig, redis: Redis, tmp_path: Path
) -> None:
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await until_key(redis, topology.weights_current(job_id))
    (tmp_path / "rows.jsonl").unlink()
    async with running(config, tmp_path) as trainer:
        status = await trainer.until_state(job_id, "failed")
        assert "rows.jsonl" in status["error"]
        await until_expiring(redis, topology.weights_current(job_id))
    announced = JobAnnounced.unpack(await redis.get(topology.JOB_CURRENT))
    assert (announced.job_id, announced.state) == (job_id, "finished")


async def test_a_tokenizer_that_was_cut_meanwhile_fails_the_job_and_not_the_trainer(
    config: TrainerConfig, tmp_path: Path
) -> None:
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await trainer.until_state(job_id, "running")
    (tmp_path / "policy" / "tokenizer.json").write_text("{")
    async with running(config, tmp_path) as trainer:
        status = await trainer.until_state(job_id, "failed")
        assert "ValueError: " in status["error"]
        assert "tokenizer.json: " in status["error"]


async def test_a_job_whose_data_was_edited_meanwhile_goes_on_with_the_old(
    config: TrainerConfig, redis: Redis, tmp_path: Path
) -> None:
    rows, more = tmp_path / "rows.jsonl", '{"problem": "9+1=", "answer": "10"}\n'
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit()
        await until_key(redis, topology.weights_current(job_id))
    old = rows.read_text()
    rows.write_text(old + more)
    async with running(config, tmp_path) as trainer:
        status = await trainer.until_state(job_id, "failed")
        for part in (f"data.path {rows}", ": 8 rows, xxh3 ", " then, 9 rows, xxh3 "):
            assert part in status["error"]
        rows.write_text(old.replace(": ", ":  "))  # as JSON the same
        await trainer.http.post(f"/v1/jobs/{job_id}/resume")
        await trainer.until_state(job_id, "running")
        runner = trainer.app.state.runner
        async with asyncio.timeout(60):
            while (active := runner.active) is None or active.parts.publisher.current is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("mode", ["online", "train_only"])
async def test_a_job_whose_checkpoint_was_replaced_meanwhile_says_which_file(
    config: TrainerConfig, tmp_path: Path, mode: str
) -> None:
    weights = tmp_path / "policy" / "model.safetensors"
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    Recording(recorded / RECORDING_FILE).close()
    sections = {"mode": mode, "recording": str(recorded)} if mode == "train_only" else {}
    async with running(config, tmp_path) as trainer:
        job_id = await trainer.submit(**sections)
        await trainer.until_state(job_id, "failed" if sections else "running")
        await until_started(config.runs_dir / job_id, times=1)
        await trainer.http.post(f"/v1/jobs/{job_id}/pause")
        await trainer.until_state(job_id, "failed" if sections else "paused")
        weights.write_bytes((3).to_bytes(8, "little") + b"{} ")
        await trainer.http.post(f"/v1/jobs/{job_id}/resume")
        status = await trainer.until_error(job_id, "DataChanged")
        assert status["state"] == "failed"
        for part in (f"model.rollout_checkpoint {weights} is", ": 10 bytes, ", " then, 11 bytes, "):
            assert part in status["error"]


async def test_the_broker_forgets_a_job_that_is_cancelled_while_it_waits_to_go_on(
    trainer: Trainer, redis: Redis
) -> None:
    first, second = [await trainer.submit() for _ in range(2)]
    await until_key(redis, topology.weights_current(first))
    await trainer.http.post(f"/v1/jobs/{first}/pause")
    await trainer.until_state(second, "running")
    assert await redis.ttl(topology.weights_current(first)) == -1
    resumed = await trainer.http.post(f"/v1/jobs/{first}/resume")
    assert resumed.json()["state"] == "queued"
    await trainer.http.post(f"/v1/jobs/{first}/cancel")
    await until_expiring(redis, topology.weights_current(first))


async def test_events_are_streamed_to_the_end(trainer: Trainer) -> None:
    job_id = await trainer.submit()
    await trainer.until_state(job_id, "running")
    await trainer.http.post(f"/v1/jobs/{job_id}/cancel")
    await trainer.until_state(job_id, "cancelled")
    text = (await trainer.http.get(f"/v1/jobs/{job_id}/events")).text
    blocks = text.strip().split("\n\n")
    assert blocks[-1] == 'event: end\ndata: {"state": "cancelled"}'
    assert blocks[0].startswith("id: 1\ndata: {")
    names = [json.loads(block.split("data: ")[1])["name"] for block in blocks[:-1]]
    assert (names[0], names[-1]) == ("job_started", "job_finished")
    later = (await trainer.http.get(f"/v1/jobs/{job_id}/events?after={len(names)}")).text
    assert later == 'event: end\ndata: {"state": "cancelled"}\n\n'
    headers = {"Last-Event-ID": "1"}
    rest = (await trainer.http.get(f"/v1/jobs/{job_id}/events", headers=headers)).text
    assert rest.startswith("id: 2\n")
    overview = RunOverview.model_validate_json(
        (await trainer.http.get(f"/v1/jobs/{job_id}/metrics")).content
    )
    assert overview.after == len(names)
    summary = await trainer.http.get(f"/v1/jobs/{job_id}/summary")
    assert summary.json()["state"] == "cancelled"
    assert (await trainer.http.get(f"/v1/jobs/{job_id}/report")).status_code == 200


async def test_weights_of_the_active_job_are_served_in_ranges(trainer: Trainer) -> None:
    assert (await trainer.http.get("/v1/weights/0/manifest")).status_code == 404
    job_id = await trainer.submit()
    answer = await trainer.until_ok("GET", "/v1/weights/0/manifest")
    assert answer.json()["policy_version"] == 0
    asked = await trainer.http.get("/v1/weights/0/shards/0")
    assert asked.status_code == 307
    async with httpx.AsyncClient() as http:  # the bytes come from a port of their own
        whole = (await http.get(asked.headers["location"])).content
        assert len(whole) == 32
        part = await http.get(asked.headers["location"], headers={"Range": "bytes=8-"})
    assert (part.status_code, part.content) == (206, whole[8:])
    assert (await trainer.http.get("/v1/weights/0/shards/1")).status_code == 404
    assert (await trainer.http.get("/v1/weights/1/manifest")).status_code == 404
    await trainer.http.post(f"/v1/jobs/{job_id}/cancel")


async def test_inner_states_name_their_version(trainer: Trainer) -> None:
    asked = TraceRequest(sequences=[[1, 2, 3]])
    refused = await trainer.http.post("/v1/trace", content=asked.pack())
    assert refused.status_code == 409
    assert (await trainer.http.post("/v1/trace", content=b"no")).status_code == 422
    await trainer.submit()
    answer = await trainer.until_ok("POST", "/v1/trace", content=asked.pack())
    traced = Traced.unpack(answer.content)
    assert (traced.policy_version, traced.states) == (0, [{}])
    other = asked.model_copy(update={"policy_version": 3}).pack()
    assert "not 3" in (await trainer.http.post("/v1/trace", content=other)).text


async def test_kept_versions_are_told_and_an_unknown_one_is_refused(trainer: Trainer) -> None:
    assert (await trainer.http.get("/v1/jobs/none-0000/weights")).status_code == 404
    job_id = await trainer.submit()
    await trainer.until_ok("GET", "/v1/weights/0/manifest")
    kept = (await trainer.http.get(f"/v1/jobs/{job_id}/weights")).json()
    (version,) = kept["versions"]
    assert (kept["rolled_back_to"], version["policy_version"], version["is_whole"]) == (
        None,
        0,
        True,
    )
    back = f"/v1/jobs/{job_id}/weights/rollback"
    refused = await trainer.http.post(back, json={"to": 9})
    assert (refused.status_code, refused.json()["detail"]) == (
        404,
        "version 9 is not kept; kept are [0]",
    )
    assert (await trainer.http.post(back, json={"to": -1})).status_code == 422
    parts = trainer.app.state.runner.active.parts
    parts.books.keep_note(NOTE, "0")
    parts.rollback.restore()
    status = (await trainer.http.get(f"/v1/jobs/{job_id}")).json()
    assert status["doing"].startswith("serving version 0 by a rollback (training waits until ")
    assert "version 0 is served by a rollback: training waits" in status["warnings"][-1]
    assert (await trainer.http.post(back, json={"to": 0})).status_code == 202
    status = (await trainer.http.get(f"/v1/jobs/{job_id}")).json()
    assert "rollback" not in f"{status['doing']} {status['warnings']}"
    await trainer.http.post(f"/v1/jobs/{job_id}/cancel")


async def test_scores_name_their_version(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"sequences": [[1, 2, 3], [4, 5]]}
    assert (await trainer.http.post("/v1/score", json=asked)).status_code == 409
    job_id = await trainer.submit()
    await trainer.until_state(job_id, "running")
    answer = await trainer.until_ok("POST", "/v1/score", json=asked)
    assert answer.json() == {"policy_version": 0, "logprobs": [[-1.0, -1.0], [-1.0]]}
    wrong = await trainer.http.post("/v1/score", json=asked | {"policy_version": 3})
    assert wrong.status_code == 409
    assert "version 0 is held, not 3" in wrong.json()["detail"]

    async def refuse(*_: object, **__: object) -> None:
        raise StepRefused(1, "loss is nan")

    monkeypatch.setattr(RankKeeper, "score", refuse)  # new ranks had to train the newest batch
    refused = await trainer.http.post("/v1/score", json=asked)
    assert (refused.status_code, refused.json()["detail"]) == (
        503,
        "step 1 was refused: loss is nan",
    )


async def test_job_that_nobody_runs_is_ended(
    config: TrainerConfig, redis: Redis, tmp_path: Path
) -> None:
    ghost = JobAnnounced(job_id="ghost-0000", state="active", trainer_url="http://x", job={})
    await redis.set(topology.JOB_CURRENT, ghost.pack())
    async with running(config, tmp_path):
        await until_key(redis, topology.JOB_CHANGES)
        body = await redis.get(topology.JOB_CURRENT)
    assert JobAnnounced.unpack(body).state == "finished"


@pytest.mark.parametrize("route", ["", "/events", "/metrics", "/report", "/summary"])
async def test_unknown_job_is_not_found(trainer: Trainer, route: str) -> None:
    assert (await trainer.http.get(f"/v1/jobs/nobody-0000{route}")).status_code == 404


async def test_a_replica_of_another_release_hides_no_other(redis: Redis) -> None:
    replica = Replica(service="reward", name="r", url="http://r", pid=1)
    await register(redis, replica)
    key = topology.replica("scorer", "s")
    await redis.set(key, msgpack.packb(replica.model_dump() | {"service": "scorer"}))
    await redis.sadd(topology.REPLICAS, key)
    assert await live_replicas(redis, "reward") == [replica]


async def test_health_and_servers(trainer: Trainer, redis: Redis) -> None:
    await until_key(redis, topology.replica("trainer", "trainer-0"))
    assert (await trainer.http.get("/healthz")).status_code == 200
    assert (await trainer.http.get("/readyz")).status_code == 200
    assert b"# HELP" in (await trainer.http.get("/metrics")).content
    assert (await trainer.http.get("/openapi.json")).status_code == 200
    assert (await trainer.http.get("/v1/servers")).json()["servers"][0]["name"] == "trainer-0"


async def test_evaluation_pages_are_passed_on(trainer: Trainer, redis: Redis) -> None:
    app = FastAPI()

    @app.get("/evals/{path:path}")
    async def page(path: str, request: Request) -> HTMLResponse:
        if path == "gone":
            raise HTTPException(404, "no such evaluation")
        return HTMLResponse(f"{path}?{request.query_params}")

    assert (await trainer.http.get("/evals")).status_code == 503
    async with served(app) as url:
        await register(redis, Replica(service="evaluator", name="evaluator", url=url, pid=1))
        found = await trainer.http.get("/evals/compare?before=a/v1&after=a/v2")
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert found.text == "compare?before=a%2Fv1&after=a%2Fv2"
        assert (await trainer.http.get("/evals/gone")).status_code == 404
