"""The actor with real head dimensions on two GPUs: one layout's speed, memory and traffic.

    python -m tests.gpu.two_actors RANK RELEASE OUT NAME [--sequences N --length N]

Once for each rank; imports first, and then waits until `OUT/turn` has the layout's NAME. Rank r
writes `OUT/<name>.<r>.json`, and a part of every tensor after the last step to `<name>.<r>.npz`.
"""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron is imported

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.engine.actor import Actor
from services.trainer.engine.sharing import own_tensors
from services.trainer.megatron import cpu, parallel
from shared.job import Job
from shared.messages import TrainingBatch
from tests.gpu.actor_run import PROMPT, Load, samples_of, speed_job
from tests.integration.traffic_world import TrafficCounter

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor": 2},
    "ep2": {"expert": 2},
    "dp2": {},
    "pp2": {"pipeline": 2},
    "one": {},
}
STEPS = 3  # the first warms up, and its traffic is counted
TURN_FILE, TURN_S = "turn", 300.0
GROUP = 8  # sequences
SHOWN = 256  # numbers of each tensor that are compared
MESSAGE = 2**30  # bytes, of the bare collectives


def job_of(release: Path, name: str, load: Load) -> Job:
    document = {
        "cluster": {"gpus_per_node": num_ranks(name)},
        "sampling": {
            "context_length": load.length,
            "max_response_tokens": load.length - PROMPT,
            "groups_per_step": load.sequences // GROUP,
            "samples_per_prompt": GROUP,
        },
        "actor": {
            "dtype": "bfloat16",
            "quantisation": "none",
            "max_tokens_per_gpu": 16384,
            "parallel": LAYOUTS[name],
        },
    }
    return speed_job(release, document, load)


def num_ranks(name: str) -> int:
    return 1 if name == "one" else 2


def run_rank(rank: int, release: Path, out: Path, load: Load, name: str) -> None:
    job = job_of(release, name, load)
    store = dist.FileStore(str(out / f"store-{name}"), num_ranks(name))
    if not cpu.needed():
        torch.cuda.set_device(rank)
    backend = "gloo" if cpu.needed() else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks(name))
    parallel.initialise(seed=1, layout=job.layout)
    found = measure(job, load, out / f"{name}.{rank}.npz")
    if name == "dp2":
        found["bare"] = bare_collectives()
    (out / f"{name}.{rank}.json").write_text(json.dumps(found))
    parallel.leave()


def wait_for_turn(out: Path, name: str) -> None:
    ends_s = time.monotonic() + TURN_S
    while (out / TURN_FILE).read_text() != name:
        assert time.monotonic() < ends_s, f"the turn of {name} did not come in {TURN_S} s"
        time.sleep(0.05)


def measure(job: Job, load: Load, shown: Path) -> dict[str, Any]:
    """Of this rank."""
    began_s = time.perf_counter()
    actor = Actor(job)
    start_s, held = time.perf_counter() - began_s, torch.cuda.memory_allocated()
    before = dict(_parts(actor)) if dist.get_world_size() == 1 else {}
    traffic, steps = TrafficCounter(), []
    for number in range(1, STEPS + 1):
        batch = _batch(actor, load, number)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        if number == 1:
            with traffic:
                metrics = actor.train_step(batch)
        else:
            metrics = actor.train_step(batch)
        torch.cuda.synchronize()
        seconds = {**metrics["seconds"], "step": time.perf_counter() - began_s}
        kept = ("loss", "grad_norm", "entropy", "response_tokens", "micro_batches")
        steps.append({"seconds": seconds, **{key: metrics[key] for key in kept}})
    peak = torch.cuda.max_memory_allocated()
    np.savez(shown, **dict(_parts(actor)), **{f"before/{key}": one for key, one in before.items()})
    return {
        "parameters": actor.num_parameters,
        "start_s": start_s,
        "held_bytes": held,
        "peak_bytes": peak,
        "steps": steps,
        "calls": traffic.calls,
        "sent_bytes": traffic.num_bytes,
    }


def _batch(actor: Actor, load: Load, step: int) -> TrainingBatch:
    """What an untrained sampler says of any token."""
    even = np.full(load.length - 1, -np.log(actor.architecture.vocab_size), np.float32)
    samples = samples_of(actor.architecture, load, scores=[even] * load.sequences)
    return TrainingBatch(
        job_id="speed",
        step=step,
        policy_version=step - 1,
        temperature=1.0,
        samples=samples,
        group_ids=sorted({sample.group_id for sample in samples}),
    )


def _parts(actor: Actor) -> Iterator[tuple[str, np.ndarray]]:
    """Evenly spread numbers of each tensor that this rank publishes, FP32."""
    for name, tensor in own_tensors(actor.model):
        flat = tensor.detach().flatten()
        yield name, flat[:: max(1, flat.numel() // SHOWN)][:SHOWN].float().cpu().numpy()


def bare_collectives() -> dict[str, float]:
    """GB/s of large messages between the two ranks: bytes of the message in a second."""
    data = torch.zeros(MESSAGE, dtype=torch.uint8, device=cpu.device())
    halves = data.view(torch.bfloat16)
    calls = {
        "broadcast": lambda: dist.broadcast(data, 0),
        "all_reduce": lambda: dist.all_reduce(halves),
    }
    found = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        found[name] = round(5 * MESSAGE / (time.perf_counter() - began_s) / 1e9, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("release", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("name", choices=LAYOUTS)
    parser.add_argument("--sequences", type=int, default=Load.sequences)
    parser.add_argument("--length", type=int, default=Load.length)
    given = parser.parse_args()
    load = Load(given.sequences, given.length)
    wait_for_turn(given.out, given.name)
    run_rank(given.rank, given.release, given.out, load, given.name)


if __name__ == "__main__":
    main()
