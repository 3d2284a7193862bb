"""A job asks for an engine that this machine lacks: people are told, and nothing is left behind."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.spec import ServerSpec
from shared.models.deepseek_v4.architecture import Architecture
from shared.registry import live_replicas
from tests.integration.rollout_world import (
    announce_job,
    eventually,
    job_document,
    rollout_process,
    serving_trainer,
)

CHECKPOINT = Path("assets/tiny-dsv4").absolute()
REASON = f"SGLang is not installed for {sys.executable}: ROLLOUT_SGLANG__PYTHON names"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter has no SGLang; a service tries twice, quickly."""
    monkeypatch.delenv("ROLLOUT_SGLANG__PYTHON", raising=False)
    monkeypatch.setenv("ROLLOUT_SGLANG__PLATFORM", "cpu")
    monkeypatch.setenv("ROLLOUT_ENGINE_STARTS", "2")
    monkeypatch.setenv("ROLLOUT_ENGINE_RETRY_S", "0.1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


async def test_a_server_says_why_it_has_no_engine_and_tries_only_so_often(
    redis: Redis, redis_url: str, free_port: int, tmp_path: Path
) -> None:
    async with (
        serving_trainer() as trainer,
        rollout_process(redis_url, free_port, tmp_path) as server,
    ):
        asked = {"engine": "sglang", "weights": "float32", "quantise_activations": False}
        await announce_job(redis, trainer, job_document(CHECKPOINT, rollout=asked))

        async def gave_up() -> bool:
            return any(one.gave_up for one in await live_replicas(redis, "rollout"))

        await eventually(gave_up, "the service to give up", timeout_s=60)
        (record,) = await live_replicas(redis, "rollout")
        assert record.state == "stopped"
        assert REASON in record.trouble
        health = (await server.http.get(f"{server.url}/healthz")).json()
        assert health["status"] == "degraded"
        assert "2 of 2 tries and is not tried again: " in health["reason"]
        assert REASON in health["reason"]
        told = [json.loads(line) for line in (tmp_path / "rollout-0.log").read_text().splitlines()]
        assert sum(line.get("event") == "engine_not_started" for line in told) == 2
        assert not list((tmp_path / "tmp").glob("tandem-sglang-*"))


async def test_a_job_without_an_engine_pauses_with_the_reason(tmp_path: Path) -> None:
    arguments = ["--job", "configs/demo-sglang.toml", "--rollout", "1", "--ports-from", "0"]
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "demo", *arguments),
        *("--runs-dir", str(tmp_path / "runs")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(os.environ),
    )
    try:
        output, _ = await asyncio.wait_for(demo.communicate(), 100)
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
    told = " ".join(output.decode().split())
    assert demo.returncode != 0, told
    assert "no rollout server can start its engine" in told
    (run,) = (tmp_path / "runs").glob("demo-sglang-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [one["fields"] for one in events if one["name"] == "engine_not_started"]
    assert found[-1]["gave_up"] is True
    assert {one["server"] for one in found} == {"rollout-0"}
    assert all(REASON in one["error"] for one in found)
    (ended,) = [one["fields"] for one in events if one["name"] == "job_finished"]
    assert ended["state"] == "paused"
    assert REASON in ended["error"]
    assert not list((tmp_path / "tmp").glob("tandem-sglang-*"))


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    server = ServerSpec(str(CHECKPOINT), python="/nowhere/python")
    spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=server)
    with pytest.raises(FileNotFoundError, match="/nowhere/python is no interpreter on this host"):
        async with running_engine(spec):
            pass
