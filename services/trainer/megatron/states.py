"""Optimiser state as pieces of its parameters' tensors, for checkpoints of any layout.

The distributed optimiser cuts the row of all parameters into equal parts, so most parameters lie
whole on one rank: their state is read and written where it is. That of a parameter which is cut is
put together on the rank that has its start. Megatron's own way copies all of it to every host.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from services.trainer.megatron import cpu

CHUNK = 2**26  # elements that travel at once: 256 MiB of the device


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter, and which range of its elements each data-parallel rank has the state of."""

    parameter: Tensor
    parts: dict[int, range]

    @property
    def owner(self) -> int:
        return next(iter(self.parts))

    @property
    def is_whole(self) -> bool:
        return len(self.parts) == 1


def install(part: Any) -> None:
    """Have the checkpoints of `part`, a `DistributedOptimizer`, made here; the format stays
    Megatron's `fully_reshardable`."""
    part.sharded_param_state_fully_reshardable = partial(_sharded_states, part)
    part.load_parameter_state_from_fully_reshardable = partial(_take_over, part)


def _sharded_states(
    part: Any, weights: dict[str, ShardedTensor], loading: bool, _metadata: Any = None
) -> dict[int, dict[str, ShardedTensor]]:
    """By number of the parameter: FP32 `param`, `exp_avg` and `exp_avg_sq` in its shape.

    Collective when saving. Only the owner saves; whoever has a part of it loads.
    """
    pieces = {id(piece.data): piece for piece in weights.values()}
    rank = part.data_parallel_group.rank()
    found = {}
    for number, place in enumerate(_places(part)):
        piece = pieces[id(place.parameter)]
        tensors = _to_fill(part, place) if loading else _to_save(part, place)
        replica = (*piece.replica_id[:-1], rank - place.owner)
        found[number] = {
            key: replace(
                piece,
                key=f"optimizer.state.{key}.{piece.key}",
                data=tensor.view(place.parameter.shape),
                dtype=tensor.dtype,
                replica_id=replica,
            )
            for key, tensor in tensors.items()
        }
    return {number: tensors for number, tensors in found.items() if tensors}


@torch.no_grad()
def _take_over(part: Any, loaded: dict[int, dict[str, Tensor]]) -> None:
    """What was not read to its place is copied there."""
    rank = part.data_parallel_group.rank()
    for number, place in enumerate(_places(part)):
        if rank not in place.parts:
            continue
        for key, state in _states(part, place).items():
            read = loaded[number][key].flatten()[_slice(place.parts[rank])]
            if read.data_ptr() != state.data_ptr():
                state.copy_(read)


def _places(part: Any) -> Iterator[_Place]:
    """Of all parameters, in the same order on every rank."""
    ranks = part.data_parallel_group.size()
    for buffer in part.buffers:
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // ranks
            parts = {}
            for rank in range(ranks):
                first = bucket.offset + rank * share
                low, high = max(start, first), min(end, first + share)
                if low < high:
                    parts[rank] = range(low - start, high - start)
            yield _Place(parameter, parts)


def _states(part: Any, place: _Place) -> dict[str, Tensor]:
    """Of this rank's part, flat; the tensors that the optimiser works on."""
    tensors = part._get_main_param_and_optimizer_states(place.parameter)
    return {key: tensors[key].detach() for key in ("param", *part.optimizer_state_keys)}


def _to_fill(part: Any, place: _Place) -> dict[str, Tensor]:
    if part.data_parallel_group.rank() not in place.parts:
        return {}
    states = _states(part, place)
    if place.is_whole:
        return states
    number = place.parameter.numel()
    return {key: torch.empty(number, dtype=state.dtype) for key, state in states.items()}


def _to_save(part: Any, place: _Place) -> dict[str, Tensor]:
    rank = part.data_parallel_group.rank()
    if rank not in place.parts:
        return {}
    states = _states(part, place)
    if place.is_whole:
        return states
    if rank == place.owner:
        return {
            key: _joined(place, state, part.data_parallel_group) for key, state in states.items()
        }
    for state in states.values():
        _send(state, place.owner, part.data_parallel_group)
    return {}


def _joined(place: _Place, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole parameter's state on the host, from all that have parts of it."""
    whole = torch.empty(place.parameter.numel(), dtype=mine.dtype)
    whole[_slice(place.parts[place.owner])] = mine.cpu()
    for rank, elements in place.parts.items():
        if rank != place.owner:
            for chunk in whole[_slice(elements)].split(CHUNK):
                arrived = torch.empty(chunk.shape, dtype=chunk.dtype, device=cpu.device())
                dist.recv(arrived, group=group, group_src=rank)
                chunk.copy_(arrived)
    return whole


def _send(state: Tensor, owner: int, group: dist.ProcessGroup) -> None:
    for chunk in state.split(CHUNK):
        dist.send(chunk.to(cpu.device()), group=group, group_dst=owner)


def _slice(elements: range) -> slice:
    return slice(elements.start, elements.stop)
