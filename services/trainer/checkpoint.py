"""Megatron torch_dist checkpoints of the actor: model, optimiser, generators, step and version.

One directory appears whole: written beside its place, then renamed, with `complete.json` inside and
what the conductor laid beside it for it (`checkpoint_folder.py`).
Contents are hashed when written and verified when read; anything wrong is `WeightsCorrupt`.

    start ──> copies in host memory ──thread──> files of this rank      (unless `wait`: no copies)
    finish ──> all ranks have written ──> index ──thread of rank 0──> hashes, rename

One that finds no room is given up by all ranks alike, with `Unwritable`: they hold what they held.
"""

import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from services.trainer.checkpoint_folder import (
    COMPLETE_FILE,
    building_of,
    give_up,
    job_state_of,
    put_in_place,
)
from services.trainer.disk import Unwritable, has_room
from services.trainer.engine.agreement import gather_bytes
from services.trainer.megatron.optimizer import separate_steps
from shared.errors import WeightsCorrupt

log = structlog.get_logger()
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


class Writer:
    """Saves one checkpoint at a time while its rank goes on training. Every rank has one and calls
    the same methods in the same order: they are collective."""

    def __init__(self) -> None:
        self._pending: _Pending | None = None

    def start(
        self,
        path: Path,
        *,
        model: nn.Module,
        optimizer: MegatronOptimizer,
        progress: dict[str, int],
        copy: bool = True,
    ) -> None:
        """Copy everything that a resumed run needs and begin to write it; `progress` holds step and
        policy_version. An older directory at `path` is replaced once the new one is complete.

        Without `copy` nothing may change before `finish`: tensors are written where they are.
        Raises `Unwritable` if it has more bytes than the disk.
        """
        self.finish(wait=True)
        building = building_of(path)
        _agree(path, _failure_of(partial(_clear, building)) if dist.get_rank() == 0 else None)
        state = _sharded_state(model, optimizer, loading=False)
        state["progress"] = progress
        state["generators"] = _generators_of_all()
        # Megatron would start a process just to hold this queue between a writer and itself.
        filesystem_async._results_queue = queue.Queue()
        request = dist_checkpointing.save(
            state,
            str(building),
            content_metadata=dict(_METADATA),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        _agree(path, _lack_of_room(building, request))
        live = _storages(model, optimizer) if copy else None
        self._pending = _Pending(path, progress, request, _write(request, live))

    def finish(self, *, wait: bool) -> bool:
        """Whether nothing is left to write: takes the next step once all ranks are ready for it.

        Raises `Unwritable`, once, for a checkpoint that could not be written: it is given up.
        """
        if self._pending is None:
            return True
        while self._pending is not None:
            pending = self._pending
            if not wait and not _everywhere(not pending.work.is_alive()):
                return False
            pending.work.join()
            self._pending = None
            if pending.request is None:
                _agree(pending.path, pending.work.failure)
            else:
                _agree(pending.path, _index(pending.request))
                self._pending = _last_part(pending)
        dist.barrier()
        return True


@dataclass(frozen=True, slots=True)
class _Pending:
    path: Path
    progress: dict[str, int]
    request: Any  # None once there is an index
    work: "_Work"


class _Work(threading.Thread):
    """Begins at once, and remembers what it met on the disk."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._do = do
        self.failure: str | None = None
        self.start()

    def run(self) -> None:
        self.failure = _failure_of(self._do)


def _failure_of(do: Callable[[], object]) -> str | None:
    try:
        do()
    except OSError as err:
        return str(err)
    return None


def _agree(path: Path, failure: str | None) -> None:
    """Collective: what failed on one rank ends this checkpoint on all."""
    failures = [text.decode() for text in gather_bytes((failure or "").encode())]
    if not any(failures):
        return
    error = Unwritable.at(path, next(text for text in failures if text))
    log.error("checkpoint_not_written", error=str(error))
    if dist.get_rank() == 0:
        give_up(path)
    dist.barrier()
    raise error


def _clear(building: Path) -> None:
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)


def _lack_of_room(building: Path, request: Any) -> str | None:
    """Collective: of what all ranks would write."""
    num_bytes = sum(map(int, gather_bytes(str(_bytes_to_write(request)).encode())))
    return None if has_room(building, num_bytes) else f"it has {num_bytes:,} bytes"


def _bytes_to_write(request: Any) -> int:
    """Of this rank's tensors."""
    if request.async_fn is None:
        return 0
    buckets = request.async_fn_args[1]
    return sum(tensor.nbytes for _, _, (_, found) in buckets for _, tensor in found)


def _index(request: Any) -> str | None:
    """Collective: which tensor lies where in the files of all ranks; or why a rank has none."""
    try:
        for finalize in request.finalize_fns:
            finalize()
    except CheckpointException as err:
        causes = [f"rank {rank}: {failure[0]}" for rank, failure in err.failures.items()]
        return "; ".join(causes) or "another rank could not write its part"
    return None


def _last_part(pending: _Pending) -> _Pending:
    work = partial(place, pending.path, pending.progress) if dist.get_rank() == 0 else _nothing
    return replace(pending, request=None, work=_Work(work))


def place(path: Path, progress: dict[str, int]) -> None:
    """The job's state from beside, hashes of all files, and what was built has its name."""
    building, state = building_of(path), job_state_of(path)
    for file in state.iterdir() if state.exists() else ():
        file.rename(building / file.name)
    shutil.rmtree(state, ignore_errors=True)
    save_integrity_manifest(str(building))
    _declare_complete(building, progress)
    put_in_place(path)


def _declare_complete(building: Path, progress: dict[str, int]) -> None:
    scratch = building / f".{COMPLETE_FILE}"
    with scratch.open("w") as file:
        json.dump(progress, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(building / COMPLETE_FILE)


def _nothing() -> None:
    return None


def _write(request: Any, live: set[int] | None) -> _Work:
    """Writes this rank's tensors; copies of those in `live` storages, if any will change meanwhile.

    From a device they come at once where there are `live` ones, and else one by one.
    """
    if request.async_fn is None:
        return _Work(_nothing)
    rank, buckets, *rest = request.async_fn_args
    tensors: list[Any] = [
        ((item, _on_host(tensor, live or set())) for item, tensor in found)
        for _, _, (_, found) in buckets
    ]
    if live is not None:
        tensors = [list(found) for found in tensors]
    work = [
        (file, key, (blobs, found))
        for (file, key, (blobs, _)), found in zip(buckets, tensors, strict=True)
    ]
    return _Work(partial(request.async_fn, rank, work, *rest, **request.async_fn_kwargs))


def _on_host(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    is_live = tensor.untyped_storage().data_ptr() in live
    return tensor.detach().to("cpu", copy=is_live)


def _storages(model: nn.Module, optimizer: MegatronOptimizer) -> set[int]:
    """Of everything that training changes. Other tensors of a save are Megatron's copies already,
    or were put together for it."""
    tensors = [*model.parameters(), *model.buffers()]
    for part in optimizer.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            tensors += [parameter, *state.values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _everywhere(done: bool) -> bool:
    answer = torch.tensor([done], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def save(
    path: Path, *, model: nn.Module, optimizer: MegatronOptimizer, progress: dict[str, int]
) -> None:
    """Write a checkpoint and wait for it. Every rank calls it."""
    writer = Writer()
    writer.start(path, model=model, optimizer=optimizer, progress=progress, copy=False)
    writer.finish(wait=True)


def load(path: Path, *, model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, int]:
    """Restore what `save` wrote; -> its `progress`. Raises `WeightsCorrupt` with the cause."""
    if not (path / COMPLETE_FILE).exists():
        raise WeightsCorrupt(f"{path}: no {COMPLETE_FILE}, so it was never finished")
    state = _read(path, _sharded_state(model, optimizer, loading=True))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    separate_steps(optimizer)
    if "generators" not in state:
        raise WeightsCorrupt(f"{path}: no generators; an older release wrote it otherwise")
    _restore_generators(state["generators"])
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


def _generators_of_all() -> list[dict[str, Any]]:
    """Collective: states of every rank's generators, in order of ranks."""
    mine = {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    found: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _restore_generators(saved: list[dict[str, Any]]) -> None:
    """Each rank its own; on another number of ranks the host's of rank 0, and the others as they
    were seeded."""
    same = len(saved) == dist.get_world_size()
    mine = saved[dist.get_rank() if same else 0]
    if same:
        get_cuda_rng_tracker().set_states(mine["megatron"])
        torch.cuda.set_rng_state(mine["device"])
    torch.set_rng_state(mine["host"])


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
