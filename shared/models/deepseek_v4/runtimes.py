"""Carry weights between release names and a runtime's own layout (fused, stacked).

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
        if name in table:
            pieces.setdefault(table[name].name, {})[table[name]] = tensor
    return {name: _join(parts) for name, parts in pieces.items()}


def from_runtime(
    state: Mapping[str, Tensor], arch: Architecture, runtime: Runtime
) -> dict[str, Tensor]:
    """The inverse, for values in full precision; KeyError names a tensor the runtime lacks."""
    table, shapes = places(arch, runtime), weight_shapes(arch)
    rows = {place: shapes[name][0] for name, place in table.items() if name in shapes}
    return {
        name: _cut(state[table[name].name], table[name], rows) for name in shapes if name in table
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
