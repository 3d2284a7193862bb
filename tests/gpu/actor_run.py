"""An actor with the release's head dimensions on one GPU: speed, peak memory, share of the peak.

`python -m tests.gpu.actor_run FOLDER [--document JSON]` measures in a process of its own, so that
the peak is its own; the document is merged into the job, so every memory setting is a variant.
Weights are random and gentle; text is random, since speed does not depend on either.
"""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron is imported

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from services.trainer.engine.actor import Actor
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4 import head
from shared.job import Job, load_job_file
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import weight_shapes
from tests.gpu.bandwidth import median_ms

PROMPT = 128
STEPS = 3  # measured; one more warms up


@dataclass(frozen=True)
class Load:
    """Of one step."""

    sequences: int = 64
    length: int = 1024

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def measure_apart(folder: Path, document: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """`measure` in a process of its own; `more` of its arguments."""
    command = [sys.executable, "-m", "tests.gpu.actor_run", str(folder), *more]
    child = subprocess.run(
        [*command, "--document", json.dumps(document)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def measure(folder: Path, document: Mapping[str, Any], *, load: Load) -> dict[str, Any]:
    """Seconds and bytes of training steps on the release in `folder`; `document` is merged into a
    BF16 job, section by section."""
    actor = Actor(speed_job(folder, document, load))
    held = torch.cuda.memory_allocated()
    began_s = time.perf_counter()
    scores = actor.score([sample.token_ids for sample in samples_of(actor.architecture, load)])
    score_s = time.perf_counter() - began_s
    seconds: list[dict[str, float]] = []
    for step in range(1, STEPS + 2):
        samples = samples_of(actor.architecture, load, scores=scores)
        batch = TrainingBatch(
            job_id="speed",
            step=step,
            policy_version=step - 1,
            temperature=1.0,
            samples=samples,
            group_ids=sorted({sample.group_id for sample in samples}),
        )
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        metrics = actor.train_step(batch)
        torch.cuda.synchronize()
        seconds.append({**metrics["seconds"], "step": time.perf_counter() - began_s})
    phases = {name: median(one[name] for one in seconds[1:]) for name in seconds[0]}
    flops = training_flops(actor.architecture, load)
    return {
        "parameters": actor.num_parameters,
        "tokens_per_step": load.tokens,
        "sequence_length": load.length,
        "seconds": {name: round(value, 4) for name, value in phases.items()},
        "first_score_seconds": round(score_s, 3),
        "tokens_per_s": round(load.tokens / phases["step"]),
        "model_tflops_per_s": round(flops / phases["step"] / 1e12, 2),
        "share_of_measured_peak": round(flops / phases["step"] / matrix_peak(), 4),
        "gib_after_start": round(held / 2**30, 2),
        "gib_peak": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def training_flops(arch: Architecture, load: Load) -> float:
    """Of forward and backward, 2 to a multiplied weight or key and thrice that; recomputation does
    not count. Experts count as often as they are chosen, keys as far as they are visible."""
    weights = 0.0
    for name, shape in weight_shapes(arch).items():
        if len(shape) != 2 or name == "embed.weight" or name.endswith("tid2eid"):
            continue
        chosen = arch.num_experts_per_tok / arch.n_routed_experts if ".experts." in name else 1.0
        rows = shape[0] * shape[1]
        weights += rows * chosen
    keys = sum(_visible_keys(arch, layer, load.length) for layer in range(arch.num_hidden_layers))
    attention = 2 * 2 * arch.num_attention_heads * arch.head_dim * keys
    return 3.0 * load.tokens * (2 * weights + attention)


@cache
def matrix_peak() -> float:
    """FLOP/s of a large BF16 product of random numbers."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (median_ms(lambda: a @ b) * 1e-3)


def _visible_keys(arch: Architecture, layer: int, length: int) -> float:
    """Window tokens and entries that a query sees, in the mean over a sequence."""
    position = np.arange(length)
    window = np.minimum(position + 1, arch.sliding_window)
    ratio = arch.compress_ratios[layer]
    entries = (position + 1) // ratio if ratio else 0 * position
    if arch.kind(layer) == "c4":
        entries = np.minimum(entries, arch.index_topk)
    return float((window + entries).mean())


def speed_job(folder: Path, document: Mapping[str, Any], load: Load) -> Job:
    """The demo in BF16 on the release in `folder`, with `document` merged into it."""
    merged: dict[str, Any] = dict(load_job_file(Path("configs/demo.toml")))
    base = {
        "model": {"rollout_checkpoint": str(folder)},
        "actor": {"dtype": "bfloat16", "quantisation": "none", "max_tokens_per_gpu": 16384},
        "bounds": {"max_mean_abs_delta_logprob": 10.0},
        "sampling": {"context_length": load.length, "max_response_tokens": load.length - PROMPT},
        # Steps alone are measured: nothing is scored between them as servers would.
        "preflight": {"enabled": False},
        "update": {"probe_sequences": 0},
    }
    for part in (base, document):
        for section, fields in part.items():
            merged[section] = {**merged.get(section, {}), **fields}
    return Job.model_validate(merged)


def samples_of(
    arch: Architecture, load: Load, *, scores: Sequence[np.ndarray] | None = None
) -> list[TrainingSample]:
    """Random text; half of it is to become likelier. `scores`: what the sampler said of it."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(load.sequences):
        ids = generator.integers(0, arch.vocab_size, load.length, dtype=np.int32)
        logprobs = np.zeros(load.length - PROMPT, np.float32)
        if scores is not None:
            logprobs = scores[number][PROMPT - 1 :].astype(np.float32)
        samples.append(
            TrainingSample(
                rollout_id=f"g{number // 8}.{number % 8}",
                group_id=f"g{number // 8}",
                token_ids=ids,
                num_prompt_tokens=PROMPT,
                sampler_logprobs=logprobs,
                advantage=1.0 if number % 2 else -1.0,
                reward=float(number % 2),
                oldest_version=0,
            )
        )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--document", type=json.loads, default={})
    parser.add_argument("--sequences", type=int, default=Load.sequences)
    parser.add_argument("--length", type=int, default=Load.length)
    parser.add_argument("--token-chunk", type=int, default=head.TOKEN_CHUNK)
    given = parser.parse_args()
    head.TOKEN_CHUNK = given.token_chunk
    parallel.initialise(seed=1)
    found = measure(given.folder, given.document, load=Load(given.sequences, given.length))
    parallel.leave()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
