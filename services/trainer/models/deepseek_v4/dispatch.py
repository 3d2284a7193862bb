"""Sends routed rows to the ranks that hold their experts, and what these make of them back.

    rows by expert ──all-to-all──> rows of my experts, by expert ──experts──> ──all-to-all──> rows

Ranks that share the inner width of an expert all get its rows; their partial results are summed in
FP32 where the row came from. Megatron's all-to-all carries the gradients the same way back.
"""

# M rows of this rank, sorted by expert; N rows of this rank's experts; E experts, e local ones
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from services.trainer.models.deepseek_v4.layers import wide


class Dispatch:
    """Of one micro-batch in one layer; `counts[e]` rows come to local expert e."""

    def __init__(self, counts_E: Tensor, *, num_local: int) -> None:
        self._group = parallel_state.get_expert_tensor_and_model_parallel_group()
        self._route = None
        self.counts = counts_E.tolist()
        if self._group.size() > 1:
            self._route = _exchange(counts_E, num_local=num_local, group=self._group)
            self.counts = self._route.counts

    def to_experts(self, rows_MC: Tensor) -> Tensor:
        """`[M, C]` sorted by expert -> `[N, C]` sorted by local expert."""
        route = self._route
        if route is None:
            return rows_MC
        sent = rows_MC if route.copies is None else rows_MC.index_select(0, route.copies)
        arrived = all_to_all(self._group, sent, route.receives, route.sends)
        return arrived.index_select(0, route.order)

    def from_experts(self, rows_NC: Tensor) -> Tensor:
        """The way back: `[N, C]` -> `[M, C]`, FP32 if partial results were summed."""
        route = self._route
        if route is None:
            return rows_NC
        rows = rows_NC.index_select(0, route.place)
        returned = all_to_all(self._group, rows, route.sends, route.receives)
        if route.copies is None:
            return returned
        total = wide(returned).new_zeros(route.num_rows, returned.size(1))
        return total.index_add(0, route.copies, wide(returned))


def own_tokens(x: Tensor) -> Tensor:
    """This tensor-parallel rank's part of tokens that all of them hold alike."""
    if _tensor_group().size() == 1:
        return x
    return scatter_to_sequence_parallel_region(x, group=_tensor_group())


def all_tokens(x: Tensor) -> Tensor:
    """The reverse of `own_tokens`; every rank goes on with all of them."""
    if _tensor_group().size() == 1:
        return x
    return gather_from_sequence_parallel_region(
        x, tensor_parallel_output_grad=False, group=_tensor_group()
    )


def _tensor_group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


@dataclass(frozen=True, slots=True)
class _Route:
    sends: list[int]  # rows to each rank of the group
    receives: list[int]  # rows from each
    counts: list[int]  # rows for each local expert
    copies: Tensor | None  # which row each sent one is, where several ranks share an expert
    order: Tensor  # arrived rows by local expert
    place: Tensor  # its inverse
    num_rows: int


def _exchange(counts_E: Tensor, *, num_local: int, group: Any) -> _Route:
    """Tell every rank of the group how many rows it gets for which of its experts."""
    shared_by = parallel_state.get_expert_tensor_parallel_world_size()
    flat = counts_E.new_empty(group.size() * counts_E.numel())
    dist.all_gather_into_tensor(flat, counts_E, group=group)
    gathered = flat.view(group.size(), -1)
    mine = group.rank() // shared_by * num_local  # members of one expert rank are neighbours
    arriving = gathered[:, mine : mine + num_local]  # [source, e]
    blocks = counts_E.view(-1, num_local).sum(1)  # rows for each expert-parallel rank
    experts = torch.arange(num_local, device=counts_E.device).repeat(group.size())
    order = torch.argsort(torch.repeat_interleave(experts, arriving.flatten()), stable=True)
    return _Route(
        sends=blocks.repeat_interleave(shared_by).tolist(),
        receives=arriving.sum(1).tolist(),
        counts=arriving.sum(0).tolist(),
        copies=_copies(blocks, shared_by),
        order=order,
        place=torch.argsort(order),
        num_rows=int(blocks.sum()),
    )


def _copies(blocks: Tensor, shared_by: int) -> Tensor | None:
    """Each block of rows `shared_by` times in a row."""
    if shared_by == 1:
        return None
    rows = torch.arange(int(blocks.sum()), device=blocks.device).split(blocks.tolist())
    return torch.cat([row for block in rows for row in [block] * shared_by])
