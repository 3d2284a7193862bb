"""The actor's first weights, a release directory dequantised, and the formats they return in."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from services.trainer.megatron import cpu
from services.trainer.models.deepseek_v4.weights import load_weights, release_tensors
from shared.job import Job
from shared.models.deepseek_v4.checkpoint import Release, dequantise_tensor, open_release
from shared.quant.policy import POLICIES, Policy, scale_name


def load_release_weights(model: nn.Module, path: Path) -> None:
    """Read only tensors of which this rank holds something, one at a time. Raises ValueError naming
    tensor, expected and found."""
    release = open_release(path)
    wanted = [name for name, _ in release_tensors(model)]
    missing = [name for name in wanted if name not in release.specs]
    if missing:
        raise ValueError(f"{path}: expected {missing[0]}, found no such tensor")
    load_weights(model, dict(_values(release, wanted)))


def served_policy(job: Job, rollout_checkpoint: Path) -> Policy:
    """Formats of the rollout checkpoint, whatever its config says, or FP32 where the job asks."""
    if job.rollout.weights == "float32":
        return POLICIES["fp32"]
    return open_release(rollout_checkpoint).policy


def _values(release: Release, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """FP32 values, on the device; a matrix and its scales may lie in different files."""
    device = cpu.device()
    scales = [_scale(name) for name in names if _scale(name) in release.specs]
    held = {name: scale.to(device) for name, scale in release.read(scales)}
    for name, codes in release.read(names):
        found = held.pop(_scale(name), None)
        yield name, dequantise_tensor(name, codes.to(device), scale=found)


def _scale(name: str) -> str:
    return scale_name(name) if name.endswith(".weight") else ""
