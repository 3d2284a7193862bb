"""The services as processes, the sampler with a mistake in its model: the preflight refuses."""

import asyncio
import shutil
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.cli.document import read_job
from services.cli.stack import choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import Program, running

ROOT = Path(__file__).parents[2]
NEEDED = ("trainer", "rollout-0")  # nothing is graded or evaluated
RIGHT, WRONG = ".permute(2, 1, 0)", ".permute(2, 0, 1)"  # C is not transposed any more


def wrong_tree(folder: Path) -> Path:
    """The project as that sampler's host has it, one line of its model other than ours."""
    for part in ("services", "shared"):
        shutil.copytree(ROOT / part, folder / part)
    model = folder / "services" / "rollout" / "models" / "deepseek_v4.py"
    source = model.read_text()
    assert source.count(RIGHT) == 1
    model.write_text(source.replace(RIGHT, WRONG))
    return folder


@pytest.mark.timeout(120)
async def test_a_job_whose_sampler_computes_otherwise_is_refused(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=1, num_reward=1, base=0)
    broker, services = stack_programs(ports, data_dir=tmp_path / "s", runs_dir=tmp_path / "runs")
    assert not isinstance(services, Program)
    trainer, sampler = (one for one in services if one.name in NEEDED)
    started = [trainer, replace(sampler, cwd=wrong_tree(tmp_path / "tree"))]
    document = read_job(ROOT / "configs" / "demo.toml", [])
    async with (
        running([broker, started], log_dir=tmp_path / "logs"),
        TandemClient(ports.trainer_url, patience_s=60.0) as client,
    ):
        async with asyncio.timeout(60):  # the trainer is up
            job_id = (await client.submit(document)).job_id
        async with asyncio.timeout(60):  # refused within a minute
            found = await _first(client, job_id, "preflight_finished")
            ended = await _first(client, job_id, "job_finished")
    assert not found["passed"], found
    assert [one["departs_at"] for one in found["parity"]] == ["layer 0 · mHC merge after attention"]
    assert ended["state"] == "failed"


async def _first(client: TandemClient, job_id: str, name: str) -> dict[str, Any]:
    """Fields of the job's first event of that name."""
    async with aclosing(client.events(job_id)) as events:
        async for numbered in events:
            if numbered.event.name in (name, "job_finished"):
                return numbered.event.fields
    raise AssertionError(f"the job ended without {name}")
