"""The whole system, twice the same job and once more from its recording: equal to the bit."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.document import read_job
from services.cli.replay import replay_document
from services.cli.stack import choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import running
from shared.weights.manifest import MANIFEST_FILE, Manifest
from tests.timed_fields import TIMED

ROOT = Path(__file__).parents[2]
STEPS = 3
CHANGES = [
    f"steps={STEPS}",
    "record=true",
    "algorithm.max_lag=0",
    "sampling.groups_per_step=3",
    "sampling.samples_per_prompt=4",
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_two_runs_and_a_replay_are_equal_to_the_bit(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=2, num_reward=1, base=0)
    runs_dir = tmp_path / "runs"
    programs = stack_programs(ports, data_dir=tmp_path / "stack", runs_dir=runs_dir)
    document = read_job(ROOT / "configs" / "demo.toml", CHANGES)
    document.pop("eval")
    async with (
        asyncio.timeout(570),
        running(programs, log_dir=tmp_path / "logs"),
        TandemClient(ports.trainer_url, patience_s=60.0) as client,
    ):
        found = [await finished(client, document, runs_dir) for _ in range(2)]
        again = replay_document(found[0], [])
        found.append(await finished(client, again, runs_dir))
    weights = [last_weights(run_dir) for run_dir in found]
    assert weights[0] == weights[1] == weights[2]
    metrics = [step_metrics(run_dir) for run_dir in found]
    assert metrics[0] == metrics[1]
    assert [step["loss"] for step in metrics[2]] == [step["loss"] for step in metrics[0]]


async def finished(client: TandemClient, document: dict[str, Any], runs_dir: Path) -> Path:
    job_id = (await client.submit(document)).job_id
    async for _ in client.events(job_id):
        pass
    status = await client.job(job_id)
    assert (status.state, status.step, status.error) == ("finished", STEPS, None)
    return runs_dir / job_id


def last_weights(run_dir: Path) -> dict[str, str]:
    """Checksums of the last version's tensors by name."""
    path = run_dir / "weights" / f"v{STEPS:08d}" / MANIFEST_FILE
    manifest = Manifest.model_validate_json(path.read_text())
    return {tensor.name: tensor.checksum for tensor in manifest.tensors}


def step_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    steps = [body["fields"] for line in lines if (body := json.loads(line))["name"] == "step"]
    return [{k: v for k, v in step.items() if k not in TIMED} for step in steps]
