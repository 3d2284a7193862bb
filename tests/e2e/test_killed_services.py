"""The whole system as processes, each killed in turn: the books must balance all the same."""

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from services.cli.document import read_job
from services.cli.stack import choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import Stack, running
from tests.balanced_books import check_books

ROOT = Path(__file__).parents[2]
STEPS = 14
KILLED_AFTER_STEP = {
    2: "rollout-0",
    4: "reward-0",
    6: "evaluator",
    8: "rank",
    10: "trainer",
    12: "broker",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_every_group_is_trained_once_whichever_process_is_killed(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=2, num_reward=1, base=0)
    runs_dir = tmp_path / "runs"
    programs = stack_programs(ports, data_dir=tmp_path / "stack", runs_dir=runs_dir)
    document = read_job(ROOT / "configs" / "demo.toml", [f"steps={STEPS}", "eval.every_steps=7"])
    async with (
        asyncio.timeout(570),
        running(programs, log_dir=tmp_path / "logs") as stack,
        TandemClient(ports.trainer_url, patience_s=120.0) as client,
    ):
        job_id = (await client.submit(document)).job_id
        await _kill_along_the_way(client, job_id, stack)
        status = await client.job(job_id)
        summary = await client.summary(job_id)
    assert (status.state, status.step, status.error) == ("finished", STEPS, None)
    run_dir = runs_dir / job_id
    check_books(run_dir / "books.sqlite", summary, steps=STEPS)
    assert [entry["step"] for entry in summary["evaluations"]] == [0, 7, 14]
    assert (run_dir / "report.html").is_file()


async def _kill_along_the_way(client: TandemClient, job_id: str, stack: Stack) -> None:
    kills = dict(KILLED_AFTER_STEP)
    async with aclosing(client.events(job_id)) as events:
        async for numbered in events:
            if numbered.event.name != "step":
                continue
            if victim := kills.pop(numbered.event.fields["step"], None):
                pid = _rank_pid(stack) if victim == "rank" else stack.pids[victim]
                os.kill(pid, signal.SIGKILL)
    assert not kills, f"never killed: {kills}"
    restarted = {name for name, num in stack.restarts.items() if num}
    assert restarted >= set(KILLED_AFTER_STEP.values()) - {"rank"}


def _rank_pid(stack: Stack) -> int:
    """The training process itself, below torchrun, below the trainer."""
    for child in psutil.Process(stack.pids["trainer"]).children(recursive=True):
        if "services.trainer.learner" in child.cmdline() and not child.children():
            return child.pid
    raise AssertionError("the trainer has no rank")
