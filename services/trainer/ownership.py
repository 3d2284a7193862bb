"""Which rank exports which tensor: each has one owner, and pairs that servers fuse have one too.

Pipeline and expert parallel ranks hold different tensors. Of a tensor-parallel group each rank
holds a slice; a scale covers 128 x 128 values (or 32) of the whole matrix, so slices are put
together before anything is quantised, one tensor at a time, at its owner. What is published is then
the same to the byte in every layout.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.models.deepseek_v4.names import fused_partner

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's slice of a release tensor along `axis`; None: every rank has all of it."""

    name: str
    values: Tensor
    axis: int | None


class PieceGroup(Protocol):
    """The ranks among which tensors are split."""

    rank: int
    size: int

    def collect(self, values: Tensor, *, axis: int, owner: int) -> Tensor | None:
        """All slices in rank order, joined along `axis`, at `owner`; None elsewhere. Collective."""


def whole_tensors(pieces: Iterable[Piece], group: PieceGroup) -> Iterator[Named]:
    """The tensors that this rank owns, put together.

    Collective: every rank of the group iterates to the end over pieces of the same names in the
    same order. Owners take turns; at most one whole tensor beyond the caller's is in memory.
    """
    owners: dict[str, int] = {}  # of tensors whose partner is still to come
    turn = 0
    for piece in pieces:
        owner = owners.pop(piece.name, None)
        if owner is None:
            owner, turn = turn % group.size, turn + 1
            if partner := fused_partner(piece.name):
                owners[partner] = owner
        if piece.axis is None:
            whole = piece.values if group.rank == owner else None
        else:
            whole = group.collect(piece.values, axis=piece.axis, owner=owner)
        if whole is not None:
            yield piece.name, whole


def fused_groups(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """Tensors one by one, but those that servers fuse together, as soon as both have come."""
    alone: dict[str, Named] = {}
    for name, tensor in tensors:
        partner = fused_partner(name)
        if partner is None:
            yield [(name, tensor)]
        elif partner in alone:
            yield [alone.pop(partner), (name, tensor)]
        else:
            alone[name] = (name, tensor)
    yield from ([one] for one in alone.values())
