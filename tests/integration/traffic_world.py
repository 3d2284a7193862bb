"""What ranks send and hold in one step, counted, for `test_planned_traffic.py`.

    python -m tests.integration.traffic_world RELEASE OUT

Every sample is as long as the job allows, so that the plan's micro-batches are those of the step.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.trainer.checkpoint import Writer
from services.trainer.engine.actor import Actor
from services.trainer.megatron import parallel
from services.trainer.megatron.tracker import MemoryTracker
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample
from tests.integration.layout_world import ALL, OTHERS, PAIR, VOCABULARY, World, fork
from tests.integration.layout_world import job as layout_job

LENGTH, RESPONSE, SAMPLES = 64, 24, 12
SMALL_BYTES = 40  # norms, shapes and agreements, which the plan leaves out
OPERATIONS = {
    "alltoall_base_": "all-to-all",
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "send": "point-to-point",
    "broadcast_": "broadcast",
}
ROUNDS = (
    (
        World("tp2", PAIR, {"tensor": 2}),
        World("pp2", OTHERS, {"pipeline": 2, "last_stage_layers": 2}),
    ),
    (World("ep2", PAIR, {"expert": 2}), World("etp2", OTHERS, {"expert_tensor": 2})),
    (World("dp2", PAIR), World("cp2", OTHERS, {"context": 2}, mtp=0.0)),
    (World("pp2ep2", ALL, {"pipeline": 2, "last_stage_layers": 2, "expert": 2}),),
    (World("tp2ep2", ALL, {"tensor": 2, "expert": 2}),),
)


def job(release: Path, world: World) -> Job:
    document = layout_job(release, world).model_dump(mode="json")
    document["sampling"] |= {"groups_per_step": 2, "samples_per_prompt": SAMPLES // 2}
    return Job.model_validate(document)


def batch() -> TrainingBatch:
    rng = np.random.default_rng(1)
    samples = [
        TrainingSample(
            rollout_id=f"g{index % 2}.{index}",
            group_id=f"g{index % 2}",
            token_ids=rng.integers(0, VOCABULARY, LENGTH),
            num_prompt_tokens=LENGTH - RESPONSE,
            sampler_logprobs=-5.5 + rng.normal(size=RESPONSE).astype(np.float32),
            advantage=float(rng.normal()),
            reward=1.0,
            oldest_version=0,
        )
        for index in range(SAMPLES)
    ]
    return TrainingBatch(
        job_id="test",
        step=1,
        policy_version=0,
        temperature=0.8,
        samples=samples,
        group_ids=["g0", "g1"],
    )


class TrafficCounter(TorchDispatchMode):
    """Calls, and bytes that leave this rank if a collective runs as a ring, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.num_bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("recv_", "barrier", "monitored_barrier_"):
            return
        operation = OPERATIONS.get(name, name)  # an unknown one stands out among the planned
        group = next(group for group in map(_group, args) if group is not None)
        if operation == "broadcast" and args[2] != group.rank():
            return  # who gets it sends nothing
        ranks = group.size()
        tensors = [one for one in tree_leaves(args[:2]) if isinstance(one, torch.Tensor)]
        size = max(one.nbytes for one in tensors)
        if ranks == 1 or size <= SMALL_BYTES:
            return
        share = {"all-reduce": 2 * (ranks - 1) / ranks, "point-to-point": 1.0, "broadcast": 1.0}
        if operation == "all-to-all":  # what is given, which is the second
            size = tensors[1].nbytes
        self.calls[operation] += 1
        self.num_bytes[operation] += size * share.get(operation, (ranks - 1) / ranks)


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):
            return None
    return None


def measure(world: World, release: Path, saved: Path) -> dict[str, Any]:
    """Of this rank; `saved` is where it writes a checkpoint after its step."""
    with MemoryTracker() as memory:
        actor = Actor(job(release, world))
        states = memory.live_bytes
        memory.restart_peak()
        with TrafficCounter() as traffic:
            actor.train_step(batch())
        activations = memory.peak_bytes - states
        before = memory.live_bytes
        memory.restart_peak()
        writer = Writer()
        writer.start(
            saved,
            model=actor.model,
            optimizer=actor.optimizer,
            progress={"step": 1, "policy_version": 1},
        )
        checkpoint = memory.peak_bytes - before
    writer.finish(wait=True)
    return {
        "checkpoint": checkpoint,
        "states": states,
        "activations": activations,
        "calls": traffic.calls,
        "bytes": traffic.num_bytes,
    }


def run_rank(rank: int, release: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for number, worlds in enumerate(ROUNDS):
        for world in worlds:
            if rank not in world.ranks:
                continue
            size, own = len(world.ranks), world.ranks.index(rank)
            store = dist.FileStore(str(out / f"store-{number}-{world.name}"), size)
            dist.init_process_group("gloo", store=store, rank=own, world_size=size)
            parallel.initialise(seed=1, layout=job(release, world).layout)
            found = json.dumps(measure(world, release, out / f"{world.name} saved"))
            (out / f"{world.name}.{own}.json").write_text(found)
            parallel.leave()


if __name__ == "__main__":
    places = [Path(argument) for argument in sys.argv[1:]]
    raise SystemExit(fork(lambda rank: run_rank(rank, *places), 4))
