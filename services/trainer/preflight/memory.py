"""Bytes that a job needs on this machine, from shapes alone: its ranks, and a sampler beside them.

The ranks' part is the planner's. Of the engine are counted its published and derived weights, both
twice during an update, its cache, and the one that a new version is probed in. Where there are
accelerators the ranks' part is theirs: one rank is planned for one device, with what its runtime
takes.
"""

import math
from dataclasses import fields
from math import prod

from services.trainer.preflight.findings import MemoryPlan
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import tensor_specs, weight_shapes
from shared.planner import plan
from shared.planner.setup import RUNTIME_BYTES

FP32_BYTES = 4
MAX_PREFIX_SLOTS = 16  # prompts that an engine computes ahead, and as many to score with
CACHE_ROWS = 16  # an engine's cache has rows in multiples
PROBED_AT_ONCE = 4  # sequences of a probe, beside the version that samples
STORED_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}


def plan_memory(job: Job, arch: Architecture, *, available_bytes: int | None) -> MemoryPlan:
    """Ranks share the machine with one sampler, unless the cluster says that samplers are apart."""
    on_host = job.cluster.gpus_per_node
    held = _rank(job, arch) | _on_host(job, arch)
    parts = {f"ranks: {name}": size * on_host for name, size in held.items()}
    if not job.cluster.rollout_nodes:
        parts |= {f"engine: {name}": size for name, size in _engine(job, arch).items()}
    return MemoryPlan(parts, sum(parts.values()), available_bytes)


def plan_device(job: Job, arch: Architecture, *, free_bytes: int | None) -> MemoryPlan:
    """The fullest rank on a device of its own."""
    parts = {f"rank: {name}": size for name, size in _rank(job, arch).items()}
    parts |= {"rank: runtime": RUNTIME_BYTES}
    return MemoryPlan(parts, sum(parts.values()), free_bytes)


def _rank(job: Job, arch: Architecture) -> dict[str, int]:
    """Of the fullest rank; none where the model cannot be cut like this, which its ranks refuse."""
    planned = plan(arch, job)
    if not planned.stages:
        return {}
    memory = planned.fullest.memory
    return {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "logits"}


def _on_host(job: Job, arch: Architecture) -> dict[str, int]:
    """What the same rank has in host memory anyway: offloaded states, a reference policy, copies
    for checkpoints."""
    planned = plan(arch, job)
    if not planned.stages:
        return {}
    host = planned.fullest.host
    sizes = {f"{f.name} on the host": getattr(host, f.name) for f in fields(host)}
    return {name: size for name, size in sizes.items() if size}


def _engine(job: Job, arch: Architecture) -> dict[str, int]:
    served = arch if job.rollout.weights == "quantised" else arch.with_format("fp32")
    published = sum(
        STORED_BYTES[spec.dtype] * prod(spec.shape) for spec in tensor_specs(served).values()
    )
    derived = FP32_BYTES * sum(prod(shape) for shape in weight_shapes(arch).values())
    return {"weights": 2 * (published + derived), "cache": _cache(job, arch)}


def _cache(job: Job, arch: Architecture) -> int:
    """Keys and entries of every slot: running ones, computed prompts, those that are scored, one
    that shows whether an update drops old state, and one for padding."""
    length = job.sampling.context_length
    slots = sum(
        running + 2 * min(running, MAX_PREFIX_SLOTS) + 2
        for running in (job.rollout.max_running_requests, PROBED_AT_ONCE)
    )
    numbers = 0
    for layer in range(arch.num_hidden_layers):
        ratio, kind = arch.compress_ratios[layer], arch.kind(layer)
        entries = _rounded(length // ratio) if ratio else 0
        numbers += (_rounded(1 + arch.sliding_window) + entries) * arch.head_dim
        if kind == "c4":
            numbers += entries * arch.index_head_dim
            numbers += 2 * ratio * 4 * (arch.head_dim + arch.index_head_dim)
        elif ratio:
            numbers += ratio * 2 * arch.head_dim
    return FP32_BYTES * slots * numbers


def _rounded(rows: int) -> int:
    return math.ceil(max(rows, 1) / CACHE_ROWS) * CACHE_ROWS
