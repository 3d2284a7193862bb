"""Carry weights between release names and a runtime's own layout (fused, stacked, split).

The table in `names` says where each tensor lies; this only cuts and joins, and never rounds.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import Place, Runtime, places, weight_shapes


def to_runtime(
    state: Mapping[str, Tensor], arch: Architecture, runtime: Runtime
) -> dict[str, Tensor]:
    """Weights by release name -> weights by the runtime's names, fused and stacked as it does."""
    table = places(arch, runtime)
    pieces: dict[str, dict[Place, Tensor]] = {}
    for name, tensor in state.items():
        for index, place in enumerate(table.get(name, ())):
            part = tensor if len(table[name]) == 1 else tensor[index : index + 1]
            pieces.setdefault(place.name, {})[place] = part
    return {name: _join(parts) for name, parts in pieces.items()}


def from_runtime(
    state: Mapping[str, Tensor], arch: Architecture, runtime: Runtime
) -> dict[str, Tensor]:
    """The inverse, for values in full precision; KeyError names a tensor the runtime lacks."""
    table, shapes = places(arch, runtime), weight_shapes(arch)
    rows = {
        place: shapes[name][0] for name, where in table.items() if name in shapes for place in where
    }
    return {
        name: torch.cat([_cut(state[place.name], place, rows).reshape(-1) for place in table[name]])
        if len(table[name]) > 1
        else _cut(state[table[name][0].name], table[name][0], rows)
        for name in shapes
        if name in table
    }


def _join(parts: Mapping[Place, Tensor]) -> Tensor:
    experts = sorted({place.expert for place in parts if place.expert is not None})
    if experts:
        return torch.stack([_join(_of_expert(parts, expert)) for expert in experts])
    if len(parts) == 1:
        return next(iter(parts.values()))
    return torch.cat([parts[place] for place in sorted(parts, key=lambda place: place.row or 0)])


def _of_expert(parts: Mapping[Place, Tensor], expert: int) -> dict[Place, Tensor]:
    return {
        Place(place.name, None, place.row): tensor
        for place, tensor in parts.items()
        if place.expert == expert
    }


def _cut(tensor: Tensor, place: Place, rows: Mapping[Place, int]) -> Tensor:
    if place.expert is not None:
        tensor = tensor[place.expert]
    if place.row is None:
        return tensor
    # Fused matrices have two row blocks: the first from the top, the second to the bottom.
    return tensor[: rows[place]] if place.row == 0 else tensor[-rows[place] :]
