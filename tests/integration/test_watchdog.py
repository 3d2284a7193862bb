"""Ranks that stand still: noticed from outside, explained, ended, and the job goes on."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from services.trainer.launch import RECORD_FILE
from tests.integration.ranks_world import NUM_RANKS, STAGES, Run, make_job

pytestmark = pytest.mark.timeout(180)
STALL_S = 4.0
NUM_STAGES = 3


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path / "run", make_job(stall_s=STALL_S))
    yield run
    await run.close()


async def test_a_stopped_rank_is_named_and_the_job_goes_on(run: Run) -> None:
    await run.keeper.restore()
    _check_record(run)
    await run.step(1)
    await run.keeper.save(1)
    await run.step(2)
    stopped = run.pid(2)
    stepping = asyncio.create_task(run.step(3))
    async with asyncio.timeout(60):
        while run.beacon(2)["step"] != 3:  # noqa: ASYNC110 # another process writes it
            await asyncio.sleep(0.01)
    os.kill(stopped, signal.SIGSTOP)
    result = await stepping
    # Every step once: checkpoint 1, replayed 2 and 3.
    assert (result["step"], result["sum"]) == (3, NUM_RANKS * (1 + 2 + 3))
    assert not psutil.pid_exists(stopped)
    events = {body["name"]: body["fields"] for _, body in run.books.journal(0)}
    assert list(events) == ["checkpoint_saved", "ranks_stalled", "rank_restarted", "replayed"]
    assert events["replayed"]["steps"] == [2, 3]
    stalled = events["ranks_stalled"]
    assert stalled["waiting"]["collective"] == "gloo:all_to_all"
    assert stalled["waiting"]["group"] == "experts"
    assert (stalled["waiting"]["arrived"], stalled["waiting"]["missing"]) == ([0, 1, 3], [2])
    assert stalled["states"] == {"2": "stopped (SIGSTOP)"}
    assert (stalled["op"], stalled["phase"], stalled["step"]) == (
        "train_step",
        "forward_backward",
        3,
    )
    (report,) = (run.run_dir / "watchdog").glob("stall-*.json")
    stacks = json.loads(report.read_text())["stacks"]
    assert "all_to_all_single" in stacks["rank0"]


async def test_a_stopped_stage_of_a_pipeline_is_named(tmp_path: Path) -> None:
    """Its neighbours wait in transfers, which no collective shows."""
    job = make_job(
        stall_s=STALL_S, parallel={"pipeline": NUM_STAGES}, cluster={"gpus_per_node": NUM_STAGES}
    )
    run = Run(tmp_path / "run", job, STAGES)
    try:
        await run.keeper.restore()
        stepping = asyncio.create_task(run.step(1))
        async with asyncio.timeout(60):
            while run.beacon(1)["step"] != 1:  # noqa: ASYNC110 # another process writes it
                await asyncio.sleep(0.01)
        os.kill(run.pid(1), signal.SIGSTOP)
        result = await stepping
        assert (result["step"], result["sum"]) == (1, 6)
        (stalled,) = [
            body["fields"] for _, body in run.books.journal(0) if body["name"] == "ranks_stalled"
        ]
        assert stalled["waiting"]["collective"] == "pipeline transfer"
        assert stalled["waiting"]["missing"] == [1]
        assert stalled["sentence"].endswith("for rank 1 (rank 1: stopped (SIGSTOP))")
    finally:
        await run.close()


def _check_record(run: Run) -> None:
    """What was started is written down, and is what the ranks got."""
    record = json.loads((run.run_dir / RECORD_FILE).read_text())
    assert record["environment"]["NCCL_DEBUG"] == "WARN"
    assert record["environment"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert record["environment"]["TANDEM_COLLECTIVE_TIMEOUT_S"] == "120"
    environment = psutil.Process(run.pid(3)).environ()
    assert record["environment"].items() <= environment.items()
    assert record["command"][1:3] == ["-m", "torch.distributed.run"]
