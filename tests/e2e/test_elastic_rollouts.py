"""A rollout that joins a running job takes part; told to stop, it leaves, and nothing is lost."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from services.cli.document import read_job
from services.cli.stack import Ports, choose_ports, stack_programs
from services.client import TandemClient
from shared.broker import broker_url
from shared.local_stack import running
from shared.process import free_port
from tests.balanced_books import check_books

ROOT = Path(__file__).parents[2]
STEPS = 12
JOINS_AFTER_STEP = 1
LATECOMER = "latecomer"
PATIENCE_S = 120.0
STOP_S = 60.0  # longer than both of its drains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_a_rollout_joins_a_running_job_and_leaves_it_on_sigterm(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=1, num_reward=1, base=0)
    runs_dir = tmp_path / "runs"
    programs = stack_programs(ports, data_dir=tmp_path / "stack", runs_dir=runs_dir)
    document = read_job(ROOT / "configs" / "demo.toml", [f"steps={STEPS}"])
    document.pop("eval")
    async with (
        asyncio.timeout(380),
        running(programs, log_dir=tmp_path / "logs"),
        TandemClient(ports.trainer_url, patience_s=PATIENCE_S) as client,
    ):
        job_id = (await client.submit(document)).job_id
        await _step(client, job_id, JOINS_AFTER_STEP)
        log_path = tmp_path / "latecomer.log"
        async with _another_rollout(ports, log_path) as process:
            await _until(lambda: _serves(client), "the latecomer to serve the job's version")
            await _until(lambda: _has_sampled(log_path), "the latecomer to sample a group")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), STOP_S) == 0
        assert LATECOMER not in {one.name for one in await client.servers()}
        assert (await client.job(job_id)).state == "running", "it left after the job's end"
        await _step(client, job_id, STEPS)
        await _until(lambda: _has_ended(client, job_id), "the job to end")
        status = await client.job(job_id)
        summary = await client.summary(job_id)
    assert (status.state, status.error) == ("finished", None)
    check_books(runs_dir / job_id / "books.sqlite", summary, steps=STEPS)


@asynccontextmanager
async def _another_rollout(
    ports: Ports, log_path: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Started as an operator would: it is told where the broker is, and nothing else."""
    own = ["--port", str(free_port()), "--replica", LATECOMER]
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout", *own),
            *("--redis-url", broker_url(ports.broker)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _step(client: TandemClient, job_id: str, step: int) -> None:
    """Wait until the job has taken the step."""
    async with aclosing(client.events(job_id)) as events:
        async for numbered in events:
            if numbered.event.name == "step" and numbered.event.fields["step"] >= step:
                return
    raise AssertionError(f"{job_id} ended before step {step}")


async def _serves(client: TandemClient) -> bool:
    servers = {one.name: one for one in await client.servers()}
    return LATECOMER in servers and servers[LATECOMER].state == "serving"


async def _has_sampled(log_path: Path) -> bool:
    return "group_sampled" in await asyncio.to_thread(log_path.read_text)


async def _has_ended(client: TandemClient, job_id: str) -> bool:
    return (await client.job(job_id)).has_ended


async def _until(claim: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not await claim():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:g} s for {what}"
        await asyncio.sleep(0.2)
