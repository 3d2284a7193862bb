"""Megatron torch_dist checkpoints of the actor: model, optimiser, generators, step and version.

One directory appears whole: written beside its place, then renamed, with `complete.json` inside.
Contents are hashed when written and verified when read; anything wrong is `WeightsCorrupt`.
"""

import json
import os
import queue
import re
import shutil
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from services.trainer.megatron.optimizer import separate_steps
from shared.errors import WeightsCorrupt

COMPLETE_FILE = "complete.json"
_MEGATRON_FILE = "metadata.json"
_INTEGRITY_FILE = "integrity.json"
# The only optimiser layout that another parallel layout can read.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_EXPERTS = re.compile(r"\.experts\.(w13|w2)$")
_INNER_WIDTH = 2  # axis of both [E, 2, I, D] and [E, D, I]


def is_checkpoint(path: Path) -> bool:
    return (path / _MEGATRON_FILE).exists()


def save(
    path: Path, *, model: nn.Module, optimizer: MegatronOptimizer, progress: dict[str, int]
) -> None:
    """Write everything that a resumed run needs; `progress` holds step and policy_version.

    Every rank calls it. An older directory at `path` is replaced once the new one is complete.
    """
    building = path.with_name(f".{path.name}.building")
    if dist.get_rank() == 0:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, loading=False)
    state["progress"] = progress
    state["generator"] = torch.get_rng_state()
    # Megatron would start a process just to hold this queue between a writer and itself.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(
        state, str(building), content_metadata=dict(_METADATA), verify_integrity=True
    )
    dist.barrier()
    if dist.get_rank() == 0:
        _appear(building, path, progress)
    dist.barrier()


def load(path: Path, *, model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, int]:
    """Restore what `save` wrote; -> its `progress`. Raises `WeightsCorrupt` with the cause."""
    if not (path / COMPLETE_FILE).exists():
        raise WeightsCorrupt(f"{path}: no {COMPLETE_FILE}, so it was never finished")
    state = _read(path, _sharded_state(model, optimizer, loading=True))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    separate_steps(optimizer)
    torch.set_rng_state(state["generator"])
    return cast(dict[str, int], state["progress"])


def load_model(model: nn.Module, path: Path) -> None:
    """Only the weights of a checkpoint, as a run's first ones."""
    state = _read(path, {"model": sharded_model(model)})
    model.load_state_dict(state["model"])


def sharded_model(model: nn.Module) -> dict[str, Any]:
    """Every parameter and table of this rank as a piece of its global tensor, by module name."""
    tensors: dict[str, Any] = dict(model.named_parameters())
    tensors |= {name: table for name, table in model.named_buffers() if name.endswith("tid2eid")}
    experts = {name: tensors.pop(name) for name in list(tensors) if _EXPERTS.search(name)}
    sharded_axes = {
        name: tensor.partition_dim
        for name, tensor in tensors.items()
        if getattr(tensor, "tensor_model_parallel", False)
    }
    dense = make_sharded_tensors_for_checkpoint(
        tensors,
        "",
        sharded_axes,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return {**dense, **{name: _sharded_experts(name, tensor) for name, tensor in experts.items()}}


def _sharded_experts(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """Stacked experts: spread over expert ranks, and each over the ranks that share its width."""
    return ShardedTensor.from_rank_offsets(
        name,
        tensor,
        (
            0,
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        ),
        (
            _INNER_WIDTH,
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        ),
        replica_id=(0, 0, parallel_state.get_expert_data_parallel_rank()),
    )


def _sharded_state(
    model: nn.Module, optimizer: MegatronOptimizer, *, loading: bool
) -> dict[str, Any]:
    weights = sharded_model(model)
    states = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_METADATA)
    return {"model": weights, "optimizer": states}


def _read(path: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    # Foreign checkpoints may carry no hashes; ours do, converted ones included.
    verify = any((path / name).exists() for name in (COMPLETE_FILE, _INTEGRITY_FILE))
    try:
        loaded = dist_checkpointing.load(sharded, str(path), verify_integrity=verify)
    except (CheckpointingException, OSError, KeyError, RuntimeError, ValueError) as err:
        raise WeightsCorrupt(f"{path}: {err}") from err
    return cast(dict[str, Any], loaded)


def _appear(building: Path, path: Path, progress: dict[str, int]) -> None:
    with (building / COMPLETE_FILE).open("w") as file:
        json.dump(progress, file)
        file.flush()
        os.fsync(file.fileno())
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    building.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
