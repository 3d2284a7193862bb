"""Tensors and bytes between the ranks of an export: who owns what, whole tensors at their owner.

Copies of a tensor are exported once: dense ones by the first data- and context-parallel rank of
their stage, experts by the first rank that holds them. What tensor-parallel ranks share is joined
at one of them, one tensor at a time.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from services.trainer.engine.agreement import gather_bytes
from services.trainer.export import Exchange
from services.trainer.models.deepseek_v4.weights import Held, held_tensors
from services.trainer.ownership import Named, Piece, whole_tensors


def own_tensors(model: nn.Module) -> Iterator[Named]:
    """The tensors that this rank publishes, whole. Collective among ranks that share tensors."""
    held = list(held_tensors(model))
    shares: list[Iterator[Named]] = []
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        group = _Group(parallel_state.get_tensor_model_parallel_group())
        shares.append(whole_tensors((_piece(one) for one in held if not one.is_expert), group))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        group = _Group(parallel_state.get_expert_tensor_parallel_group())
        shares.append(whole_tensors((_piece(one) for one in held if one.is_expert), group))
    return chain(*shares)


def exchange() -> Exchange:
    """Of all ranks."""
    return Exchange(dist.get_rank(), gather_bytes)


def _piece(held: Held) -> Piece:
    return Piece(held.name, held.tensor, held.dim if held.count > 1 else None)


class _Group:
    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def collect(self, values: Tensor, *, axis: int, owner: int) -> Tensor | None:
        values = values.contiguous()
        parts = None
        if self.rank == owner:
            parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.gather(values, parts, group=self._group, group_dst=owner)
        return None if parts is None else torch.cat(parts, axis)
