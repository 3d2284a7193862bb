"""A paused run of the whole system goes on spread over other ranks, by the command that says so."""

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from services.cli.document import read_job
from services.cli.stack import choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import running
from tests.balanced_books import check_books

ROOT = Path(__file__).parents[2]
STEPS = 5
JOB = (
    f"steps={STEPS}",
    "sampling.groups_per_step=3",
    "sampling.samples_per_prompt=4",
    "sampling.dynamic=false",
    "preflight.enabled=false",
    "eval.every_steps=5",
    "eval.max_problems=1",
    "eval.samples_per_problem=1",
)
SPREAD = ("cluster.gpus_per_node=2", "actor.parallel.pipeline=2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


async def test_a_run_of_one_rank_goes_on_as_two_stages(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=1, num_reward=1, base=0)
    runs_dir = tmp_path / "runs"
    programs = stack_programs(ports, data_dir=tmp_path / "stack", runs_dir=runs_dir)
    document = read_job(ROOT / "configs" / "demo.toml", JOB)
    async with (
        asyncio.timeout(180),
        running(programs, log_dir=tmp_path / "logs"),
        TandemClient(ports.trainer_url, patience_s=60) as client,
    ):
        job_id = (await client.submit(document)).job_id
        await _pause_after(client, job_id, step=2)
        changes = [part for change in SPREAD for part in ("--set", change)]
        await _cli("resume", job_id, *changes, "--trainer", ports.trainer_url)
        async with aclosing(client.events(job_id)) as events:
            async for _ in events:
                pass  # until it has ended
        status, summary = await client.job(job_id), await client.summary(job_id)
    assert (status.state, status.step, status.error) == ("finished", STEPS, None)
    run_dir = runs_dir / job_id
    check_books(run_dir / "books.sqlite", summary, steps=STEPS, groups_per_step=3)
    job = json.loads((run_dir / "job.json").read_text())
    assert job["actor"]["parallel"]["pipeline"] == job["cluster"]["gpus_per_node"] == 2
    assert (run_dir / "environment" / "rank1.json").is_file()


async def _pause_after(client: TandemClient, job_id: str, *, step: int) -> None:
    async with aclosing(client.events(job_id)) as events:
        async for numbered in events:  # until it is paused
            if numbered.event.name == "step" and numbered.event.fields["step"] == step:
                await client.command(job_id, "pause")
    assert (await client.job(job_id)).state == "paused"


async def _cli(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *argv,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
