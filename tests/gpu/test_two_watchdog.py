"""The learner's ranks on two GPUs: one is stopped in a collective, named, and the job goes on."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from services.trainer.launch import LEARNER
from shared.job import Job
from shared.messages import TrainingBatch
from shared.models.deepseek_v4.checkpoint import write_release
from tests.integration import layout_world
from tests.integration.layout_world import PAIR, World
from tests.integration.ranks_world import Run
from tests.integration.test_layouts import ARCHITECTURE
from tests.tiny_deepseek_v4 import random_weights

STALL_S = 10.0
START_S = 100.0
BATCHES = 12  # in one, so that a step lasts long enough to be disturbed

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, here are {torch.cuda.device_count()}",
    ),
]


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """Experts are spread over the two ranks, so that every layer has collectives."""
    release = tmp_path / "release"
    weights = random_weights(ARCHITECTURE, seed=3, spread=0.5)
    write_release(release, ARCHITECTURE.with_format("fp8"), weights)
    run = Run(tmp_path / "run", _job(release), LEARNER, _batch)
    yield run
    await run.close()


async def test_a_rank_stopped_in_a_collective_is_named_and_the_job_resumes(
    run: Run, figures: dict[str, Any]
) -> None:
    began_s = time.monotonic()
    await run.keeper.restore()
    started_s = time.monotonic() - began_s
    await run.step(1)
    await run.keeper.save(1)
    undisturbed = await run.step(2)
    stopped = run.pid(1)
    stepping = asyncio.create_task(run.step(3))
    async with asyncio.timeout(START_S):
        while not _is_within_step(run, 3):  # noqa: ASYNC110 # another process writes it
            await asyncio.sleep(0.01)
    os.kill(stopped, signal.SIGSTOP)
    stopped_s = time.monotonic()
    result = await stepping
    events = {body["name"]: body["fields"] for _, body in run.books.journal(0)}
    stalled = events["ranks_stalled"]
    (report,) = (run.run_dir / "watchdog").glob("stall-*.json")
    body = json.loads(report.read_text())
    figures["watchdog"] = {
        "seconds to start two ranks": round(started_s, 1),
        "seconds from the stop to the step's result": round(time.monotonic() - stopped_s, 1),
        "stall_s": STALL_S,
        "sentence": stalled["sentence"],
        "waiting": stalled["waiting"],
        "collectives in the dump": {
            rank: len(one["entries"]) for rank, one in body["traces"].items()
        },
        "first of them": body["traces"]["0"]["entries"][:1],
        "events": list(events),
        "loss of step 2, first and replayed": [
            undisturbed["loss"],
            run.keeper.replayed[2]["loss"],
        ],
    }
    assert not psutil.pid_exists(stopped)
    assert stalled["waiting"]["missing"] == [1]
    assert stalled["waiting"]["arrived"] == [0]
    assert stalled["states"] == {"1": "stopped (SIGSTOP)"}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    assert stalled["waiting"]["collective"].startswith(f"{backend}:")
    assert (stalled["phase"], stalled["step"]) == ("forward_backward", 3)
    assert list(events) == ["checkpoint_saved", "ranks_stalled", "rank_restarted", "replayed"]
    assert result["step"] == 3
    assert run.keeper.replayed[2]["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)


def _is_within_step(run: Run, step: int) -> bool:
    beacon = run.beacon(1)
    return (beacon["step"], beacon["phase"]) == (step, "forward_backward")


def _job(release: Path) -> Job:
    job = layout_world.job(release, World("ep2", PAIR, {"expert": 2}))
    document = job.model_dump(mode="json")
    document["actor"]["watchdog"] |= {"stall_s": STALL_S, "collective_timeout_s": 120.0}
    return Job.model_validate(document)


def _batch(step: int) -> TrainingBatch:
    """Several of the small batches, their groups apart."""
    parts = [layout_world.batch(step + 100 * number) for number in range(BATCHES)]
    samples = [
        sample.model_copy(
            update={
                "rollout_id": f"{number}.{sample.rollout_id}",
                "group_id": f"{number}.{sample.group_id}",
                "oldest_version": step - 1,
            }
        )
        for number, part in enumerate(parts)
        for sample in part.samples
    ]
    groups = sorted({sample.group_id for sample in samples})
    return layout_world.batch(step).model_copy(update={"samples": samples, "group_ids": groups})
