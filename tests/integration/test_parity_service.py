"""Parity on request: the evaluator's routes against two small servers, and the command line.

The fake services answer for one policy version; what is real: broker, registry, HTTP, the child
process with torch, tokenizer and checkpoint of the demo.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI, HTTPException
from redis.asyncio import Redis
from typer.testing import CliRunner

from services.cli.commands import app as cli
from services.evaluator.app import create_app, workers
from services.evaluator.config import EvaluatorConfig
from shared import topology
from shared.errors import HttpFailed
from shared.http import HttpClient
from shared.messages import JobAnnounced
from shared.process import free_port
from shared.registry import Replica, keep_registered, register
from shared.streams import announce
from tests.served import served

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "assets" / "tiny-dsv4"
RESPONSE = [5, 6, 7, 8]


@dataclass
class Fake:
    """Both services in one: the trainer's log p are lower by `shift` at every third token."""

    shift: float = 0.0
    policy_version: int = 4

    def app(self, who: str) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/info")
        async def info() -> dict[str, Any]:
            return {"policy_version": self.policy_version}

        @app.post("/v1/generate")
        async def generate(body: dict[str, Any]) -> dict[str, Any]:
            sample = {
                "token_ids": RESPONSE,
                "logprobs": [-t / 10 for t in RESPONSE],
                "finish_reason": "stop",
                "version_spans": [{"policy_version": self.policy_version, "num_tokens": 4}],
            }
            results = [[sample] * body["num_samples"]] * len(body["prompts"])
            return {"policy_version": self.policy_version, "results": results}

        @app.post("/v1/score")
        async def score(body: dict[str, Any]) -> dict[str, Any]:
            if body["policy_version"] not in (None, self.policy_version):
                raise HTTPException(409, f"version {self.policy_version} is held")
            shift = self.shift if who == "trainer" else 0.0
            return {
                "policy_version": self.policy_version,
                "logprobs": [
                    [-t / 10 - (shift if t % 3 == 0 else 0) for t in tokens[1:]]
                    for tokens in body["sequences"]
                ],
            }

        return app


@dataclass
class Stage:
    fake: Fake
    redis: Redis
    evaluator: str
    trainer: str
    rollout: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    registering: asyncio.Task[None] | None = None
    """A command may take longer to start than a replica's lease lasts."""

    @property
    def replica(self) -> Replica:
        return Replica(
            service="rollout", name="r", url=self.rollout, pid=1, job_id="j", policy_version=4
        )

    async def announce_job(self) -> None:
        job = {
            "name": "demo",
            "model": {"rollout_checkpoint": str(POLICY)},
            "data": {"path": str(ROOT / "assets/arithmetic/train.jsonl")},
            "sampling": {
                "groups_per_step": 2,
                "samples_per_prompt": 2,
                "context_length": 64,
                "max_response_tokens": 24,
            },
            "steps": 2,
            "reward": {"grader": "arithmetic"},
        }
        message = JobAnnounced(job_id="j", state="active", trainer_url=self.trainer, job=job)
        changes, current = topology.JOB_CHANGES, topology.JOB_CURRENT
        await announce(self.redis, changes, message.pack(), current_key=current)
        await register(self.redis, self.replica)
        self.registering = asyncio.create_task(
            keep_registered(self.redis, lambda: self.replica, self.stop)
        )

    async def result(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST, then GET until it has ended."""
        async with HttpClient() as http:
            status = await http.post(f"{self.evaluator}/v1/parity", body)
            async with asyncio.timeout(20):
                while status["state"] in ("queued", "running"):
                    await asyncio.sleep(0.05)
                    status = await http.get(f"{self.evaluator}/v1/parity/{status['parity_id']}")
        return dict(status)


@pytest_asyncio.fixture
async def stage(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    fake, ports = Fake(), [free_port() for _ in range(3)]
    config = EvaluatorConfig(
        host="127.0.0.1", port=ports[0], redis_url=redis_url, replica="e", runs_dir=tmp_path
    )
    evaluator = create_app(config)
    apps = [evaluator, fake.app("trainer"), fake.app("rollout")]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with contextlib.AsyncExitStack() as stack:
        for app, port in zip(apps, ports, strict=True):
            await stack.enter_async_context(served(app, port=port))
        stage = Stage(fake, redis, *urls)
        tasks = [asyncio.create_task(worker(stage.stop)) for worker in workers(evaluator, config)]
        try:
            yield stage
        finally:
            stage.stop.set()
            tasks += [stage.registering] if stage.registering else []
            for task in tasks:
                await asyncio.wait_for(task, 60)


async def test_first_prompts_of_the_job_are_compared_by_default(stage: Stage) -> None:
    await stage.announce_job()
    status = await stage.result({"num_samples": 2})
    report = status["report"]
    assert (status["state"], report["passed"]) == ("finished", True)
    assert report["figures"]["num_sequences"] == 8 * 2
    assert report["figures"]["num_tokens"] == 8 * 2 * len(RESPONSE)
    assert (report["figures"]["max"], report["policy_version"]) == (0, 4)
    assert report["worst"][0]["token_text"] is not None


async def test_departure_fails_and_its_page_shows_it(stage: Stage) -> None:
    await stage.announce_job()
    stage.fake.shift = 0.9
    status = await stage.result({"prompts": ["37+48="], "walk": True})
    report = status["report"]
    assert report["violations"] == ["mean |Δ log p| 0.225 exceeds 0.04"]
    assert (report["worst"][0]["token_id"], report["decoding"]["max"]) == (6, 0)
    assert "log-probabilities only" in report["notes"][0]
    async with HttpClient() as http:
        listed = await http.get(f"{stage.evaluator}/v1/parity")
        page = await http.get(f"{stage.evaluator}/v1/parity/{status['parity_id']}/report")
    assert [one["parity_id"] for one in listed["parity"]] == [status["parity_id"]]
    assert b"data:image/png" in page


async def test_services_may_be_named_without_a_job(stage: Stage) -> None:
    named = {"trainer_url": stage.trainer, "rollout_url": stage.rollout}
    status = await stage.result(named | {"sequences": [[1, 2, 3], [4, 5]]})
    assert status["report"]["figures"]["num_tokens"] == 3
    assert not status["report"]["sampled_by_ours"]
    wanted = named | {"sequences": [[1, 2]], "policy_version": 4}
    stage.fake.policy_version = 3  # it may come
    failed = await stage.result(wanted | {"deadline_s": 0.4})
    assert failed["state"] == "failed"
    assert "version 3 is held" in failed["error"]
    stage.fake.policy_version = 9  # it is gone
    failed = await stage.result(wanted | {"deadline_s": 600})
    assert failed["error"] == "the sampler serves version 9 already, not 4"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 409, "no rollout server serves a version"),
        ({"rollout_url": "file:///etc"}, 422, "String should match"),
        ({"sequences": [[1]]}, 422, "fewer than 2 tokens"),
        ({"prompts": ["a"], "sequences": [[1, 2]]}, 422, "not both"),
        ({"rollout_url": "http://a", "trainer_url": "http://b"}, 422, "give sequences"),
        ({"promts": ["a"]}, 422, "Extra inputs"),
    ],
)
async def test_wrong_requests_are_refused(
    stage: Stage, body: dict[str, Any], status: int, message: str
) -> None:
    async with HttpClient() as http:
        with pytest.raises(HttpFailed, match=message) as refused:
            await http.post(f"{stage.evaluator}/v1/parity", body)
    assert refused.value.status == status
    async with HttpClient() as http:
        with pytest.raises(HttpFailed, match="no parity run x is remembered"):
            await http.get(f"{stage.evaluator}/v1/parity/x")


async def test_command_line_compares_running_services(stage: Stage, tmp_path: Path) -> None:
    await stage.announce_job()
    stage.fake.shift = 0.3
    file = tmp_path / "report.json"
    code, out, err = await command(
        *("--evaluator", stage.evaluator, "--prompt", "37+48=", "--json", str(file))
    )
    assert (code, err) == (1, "")
    assert "FAIL: mean |Δ log p| 0.075 exceeds 0.04" in out
    assert json.loads(file.read_text())["policy_version"] == 4


async def test_command_line_compares_checkpoints(tmp_path: Path) -> None:
    page, tokens = tmp_path / "report.html", tmp_path / "tokens.json"
    tokens.write_text("[[3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]")
    code, out, err = await command(
        *(str(POLICY), f"{POLICY}@served", "--tokens", str(tokens)),
        *("--isolate", "--max-mean", "9", "--html", str(page)),
    )
    assert (code, err) == (1, "")
    assert "tiny-dsv4@plain against" in out
    assert "layer walk (isolated): layer 0 ·" in out
    assert "Tokens sent to the same experts" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("only-one",), "Name two checkpoints, or none"),
        (("a@half", "b"), "'half' is not plain, served or release"),
        (("nowhere", "nowhere"), "nowhere"),
        (("--evaluator", "http://127.0.0.1:9"), "No evaluator answers"),
        ((str(POLICY), str(POLICY), "--tokens", "pyproject.toml"), "pyproject.toml"),
    ],
)
def test_command_line_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(cli, ["parity", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


async def command(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "parity", *arguments),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()
