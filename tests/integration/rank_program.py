"""Ranks without a model, for tests of launch and watchdog: a step is some all-to-alls over gloo.

Started like the learner, it answers the same operations; a checkpoint is the sum of all steps.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.engine.broadcast import Broadcast
from services.trainer.launch import ADDRESS_VARIABLE, TIMEOUT_VARIABLE, WATCHDOG_VARIABLE
from services.trainer.watchdog.beacon import Beacon
from shared.channel import SyncChannel
from shared.messages import TrainingBatch
from shared.process import die_with_parent

NUM_EXCHANGES = 50
COMPUTE_S = 0.01  # between two exchanges, so that a step lasts long enough to be disturbed


def exchange(step: int, group: Any) -> int:
    """The sum of what arrived."""
    sent = torch.full((dist.get_world_size(),), step)
    arrived = torch.empty_like(sent)
    for _ in range(NUM_EXCHANGES):
        dist.all_to_all_single(arrived, sent, group=group)
        time.sleep(COMPUTE_S)
    return int(arrived.sum())


def main(work: Callable[[int, Any], int] = exchange) -> None:
    die_with_parent()
    rank = int(os.environ["RANK"])
    beacon = Beacon(Path(os.environ[WATCHDOG_VARIABLE]), rank)
    channel = SyncChannel.connect(os.environ[ADDRESS_VARIABLE]) if rank == 0 else None
    timeout = timedelta(seconds=float(os.environ[TIMEOUT_VARIABLE]))
    dist.init_process_group("gloo", timeout=timeout)
    dist.new_group([0])  # most ranks are no member of some groups
    experts = dist.new_group(group_desc="experts")
    broadcast, state = Broadcast(), {"step": 0, "sum": 0}
    while True:
        request = channel.recv() if channel else None
        op, payload = broadcast.share((request.op, request.payload) if request else None)
        beacon.begin(op)
        if op == "stop":
            break
        _take(op, payload, state, beacon, experts, work, rank=rank)
        beacon.begin("")
        if channel and request:
            channel.reply(request.id, {"step": state["step"], "sum": state["sum"]})
    dist.destroy_process_group()
    beacon.close()


def _take(
    op: str,
    payload: dict[str, Any],
    state: dict[str, int],
    beacon: Beacon,
    group: Any,
    work: Callable[[int, Any], int],
    *,
    rank: int,
) -> None:
    if op == "train_step":
        step = TrainingBatch.unpack(payload["batch"]).step
        beacon.note("forward_backward", step)
        state.update(step=step, sum=state["sum"] + work(step, group))
    elif op == "save" and rank == 0:
        path = Path(payload["path"])
        path.mkdir(parents=True)
        (path / "complete.json").write_text(json.dumps(state))
    elif op == "load":
        state.update(json.loads((Path(payload["path"]) / "complete.json").read_text()))


if __name__ == "__main__":
    main()
