"""Context parallelism: every rank holds consecutive tokens of each row, as many as any other.

Queries stay where they are; keys and compressed entries, one vector for all heads, are gathered.
Their gradients come back summed, in the dtype that was gathered.
"""

# B rows, S tokens of this rank, C channels
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


def size() -> int:
    return parallel_state.get_context_parallel_world_size()


def first(length: int) -> int:
    """Position in its row of this rank's first token, if it holds `length` tokens of every row."""
    return parallel_state.get_context_parallel_rank() * length


def gather(x_BSC: Tensor) -> Tensor:
    """`[B, S, …]` of every rank, in the order of tokens: `[B, ranks · S, …]`."""
    if size() == 1:
        return x_BSC
    gathered = gather_from_sequence_parallel_region(
        x_BSC.transpose(0, 1).contiguous(), group=_group()
    )
    return gathered.transpose(0, 1)


def from_previous(x_BSC: Tensor, *, fill: float) -> Tensor:
    """The previous rank's `x`; the first rank gets `fill`.

    A collective, forward and backward: no rank may leave it out.
    """
    nothing = torch.full_like(x_BSC, fill)
    if size() == 1:
        return nothing
    rank, length = parallel_state.get_context_parallel_rank(), x_BSC.size(1)
    before = gather(x_BSC)[:, (rank - 1) % size() * length :][:, :length]
    return nothing + 0 * before if rank == 0 else before


def _group() -> Any:
    return parallel_state.get_context_parallel_group()
