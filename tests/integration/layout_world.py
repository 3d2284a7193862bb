"""Runs one small training job on many layouts in one set of four processes, for `test_layouts.py`.

    python -m tests.integration.layout_world RELEASE OUT

The processes are forked from one that has imported everything. In every round each of them belongs
to one world of one, two or four ranks; what a world found lies in `OUT/<its name>`.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import torch.distributed as dist

from services.trainer import checkpoint
from services.trainer.engine.actor import Actor
from services.trainer.engine.published import published_checksum
from services.trainer.engine.sharing import exchange, own_tensors
from services.trainer.export import export_version
from services.trainer.megatron import cpu, parallel
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample
from shared.process import die_with_parent

VOCABULARY = 320
STEPS = 3
SAVED = (1, 3)


@dataclass(frozen=True, slots=True)
class World:
    """`ranks` train on one layout, from the first weights or from another world's step 1."""

    name: str
    ranks: tuple[int, ...]
    parallel: dict[str, int] = field(default_factory=dict)
    mtp: float = 0.3
    resumes: str | None = None
    offload: float = 0.0
    precision: str = "dtype"
    recompute: str = "none"
    budget: int = 192


PAIR, OTHERS, ALL = (0, 1), (2, 3), (0, 1, 2, 3)
ROUNDS = (
    (World("one", (0,)), World("plain", (3,), mtp=0.0), World("tp2", (1, 2), {"tensor": 2})),
    (
        World("pp2", PAIR, {"pipeline": 2, "last_stage_layers": 2}),
        World("ep2", OTHERS, {"expert": 2}),
    ),
    (World("dp2", PAIR), World("cp2", OTHERS, {"context": 2}, mtp=0.0)),
    (
        World("etp2", PAIR, {"expert_tensor": 2}),
        World("tp2ep2", OTHERS, {"tensor": 2, "expert": 2}),
    ),
    (World("pp2ep2", ALL, {"pipeline": 2, "first_stage_layers": 2, "expert": 2}),),
    (
        World(
            "pp2ep2 recomputed and offloaded",  # as the published run has it
            ALL,
            {"pipeline": 2, "first_stage_layers": 2, "expert": 2},
            offload=1.0,
            recompute="full",
        ),
    ),
    (World("pp2dp2", ALL, {"pipeline": 2, "last_stage_layers": 2}),),
    (World("pp4", ALL, {"pipeline": 4, "last_stage_layers": 2}),),
    (
        World("tp2 after pp2ep2", PAIR, {"tensor": 2}, resumes="pp2ep2"),
        World("one after pp2ep2", (2,), resumes="pp2ep2"),
        World("one offloaded after pp2ep2", (3,), resumes="pp2ep2", offload=0.5),
    ),
    (
        World("dp2 offloaded", PAIR, offload=0.5),
        World("ep2 offloaded", OTHERS, {"expert": 2}, offload=1.0),
    ),
    (
        World("fp8", (0,), precision="fp8"),
        World("unpacked", (1,), budget=64),  # a sequence each micro-batch
        World("fp8 ep2", OTHERS, {"expert": 2}, precision="fp8"),
    ),
)


def job(release: Path, world: World) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": STEPS,
            "model": {"rollout_checkpoint": str(release)},
            "data": {"path": "unused.jsonl"},
            "sampling": {"context_length": 64, "max_response_tokens": 24},
            "algorithm": {  # a loss of whole samples, which no rank may see in parts
                "policy_loss": "sequence_ratio",
                "proximal": "sampler",
                "correction": {"kind": "none"},
                "clip_low": 0.9,
                "clip_high": 9.0,
                "entropy_bonus": 0.01,
            },
            "bounds": {"max_mean_abs_delta_logprob": 10.0},
            "cluster": {"gpus_per_node": len(world.ranks)},
            "actor": {
                "dtype": "float32",
                "precision": world.precision,
                "max_tokens_per_gpu": world.budget,
                "freeze_router": False,
                "recompute": {"mode": world.recompute},
                "parallel": world.parallel,
                "mtp_loss_weight": world.mtp,
                "optimizer": {
                    "learning_rate": 1e-3,
                    "weight_decay": 0.1,
                    "clip_grad": 0.5,
                    "eps": 1e-5,  # gradients that are rounding noise stay noise
                    "offload": {"fraction": world.offload},
                },
            },
        }
    )


def batch(step: int) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = []
    for index in range(10):
        prompt, response = int(rng.integers(4, 40)), int(rng.integers(1, 24))
        samples.append(
            TrainingSample(
                rollout_id=f"g{index // 5}.{index % 5}",
                group_id=f"g{index // 5}",
                token_ids=rng.integers(0, VOCABULARY, prompt + response),
                num_prompt_tokens=prompt,
                sampler_logprobs=-5.5 + rng.normal(size=response).astype(np.float32),
                advantage=float(rng.normal()),
                reward=1.0,
                oldest_version=step - 1,
            )
        )
    return TrainingBatch(
        job_id="test",
        step=step,
        policy_version=step - 1,
        temperature=0.8,
        samples=samples,
        group_ids=["g0", "g1"],
    )


def train(world: World, release: Path, out: Path) -> None:
    """Steps with checkpoints, then the scores of the last batch."""
    actor = Actor(job(release, world))
    if world.resumes is not None:
        place = out / world.resumes / "step1"
        progress = checkpoint.load(place, model=actor.model, optimizer=actor.optimizer)
        actor.step, actor.policy_version = progress["step"], progress["policy_version"]
    else:
        _export(actor, out / world.name, 0)
    metrics = []
    for step in range(actor.step + 1, STEPS + 1):
        metrics.append(actor.train_step(batch(step)))
        del metrics[-1]["logprobs"]  # bytes, which JSON has not
        if step in SAVED:
            _save(actor, out / world.name / f"step{step}")
    _export(actor, out / world.name, STEPS)
    checksums = {
        name: published_checksum(out / name / f"v{STEPS}", actor.architecture, exchange())
        for name in (world.name, world.resumes)
        if name is not None
    }
    sequences = [sample.token_ids for sample in batch(1).samples]
    scores = actor.score(sequences, temperature=0.8)
    rounded = actor.score(sequences, temperature=0.8, rounding="sampler")
    if dist.get_rank() == 0:
        found = {
            "metrics": metrics,
            "scores": [row.tolist() for row in scores],
            "rounded": [row.tolist() for row in rounded],
            "checksums": checksums,
        }
        (out / world.name / "found.json").write_text(json.dumps(found))


def _export(actor: Actor, folder: Path, version: int) -> None:
    path = folder / f"v{version}"
    path.mkdir(parents=True, exist_ok=True)
    export_version(
        own_tensors(actor.model),
        path,
        job_id="test",
        policy_version=version,
        policy=actor.policy,
        max_shard_bytes=2**18,
        exchange=exchange(),
    )


def _save(actor: Actor, path: Path) -> None:
    progress = {"step": actor.step, "policy_version": actor.policy_version}
    checkpoint.save(path, model=actor.model, optimizer=actor.optimizer, progress=progress)


def run_rank(rank: int, release: Path, out: Path, rounds: tuple[tuple[World, ...], ...]) -> None:
    torch.set_num_threads(1)
    for number, worlds in enumerate(rounds):
        for world in worlds:
            if rank not in world.ranks:
                continue
            size = len(world.ranks)
            store = dist.FileStore(str(out / f"store-{number}-{world.name}"), size)
            backend = "gloo" if cpu.needed() else "nccl"
            if not cpu.needed():
                torch.cuda.set_device(rank)
            dist.init_process_group(
                backend, store=store, rank=world.ranks.index(rank), world_size=size
            )
            layout = job(release, world).layout
            parallel.initialise(seed=1, layout=layout)
            train(world, release, out)
            parallel.leave()


def fork(run: Callable[[int], None], num_ranks: int) -> int:
    """The exit code: 1 once any rank fails, and then none is left."""
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        die_with_parent()
        try:
            run(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def main(arguments: list[str]) -> Any:
    release, out = Path(arguments[0]), Path(arguments[1])
    names = arguments[2:]
    rounds = tuple(
        worlds for worlds in ROUNDS if not names or any(world.name in names for world in worlds)
    )
    return fork(lambda rank: run_rank(rank, release, out, rounds), 4)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
