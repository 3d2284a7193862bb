"""Which tensors a checkpoint layout stores, and of which release weights each consists.

A stored tensor is a sequence of equal pieces in C order: one piece, or one for each expert (and for
gate and up rows) where a layout stacks experts. So no layout needs more than a piece in memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.trainer.convert.flat_files import DTYPES
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import Place, StoredType, TensorSpec, places, tensor_specs
from shared.quant.policy import Policy


@dataclass(frozen=True, slots=True)
class Piece:
    """One release tensor (codes, scales or values) at a leading index of a stored one."""

    part: str
    weight: str
    """The weight that codes and scales are made of."""
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One stored tensor."""

    name: str
    dtype: StoredType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def release_layout(arch: Architecture, policy: Policy) -> list[Output]:
    """Release names, codes and scales apart."""
    return [
        Output(spec.name, spec.dtype, spec.shape, (Piece(spec.name, spec.weight),))
        for spec in tensor_specs(arch, policy=policy).values()
    ]


def transformers_layout(arch: Architecture, policy: Policy) -> list[Output]:
    """transformers' names; gate and up rows of all experts in one tensor. No MTP blocks."""
    table = places(arch, "transformers")
    found: dict[str, list[tuple[int, int, TensorSpec]]] = {}
    for spec in tensor_specs(arch, policy=policy).values():
        if spec.weight in table:
            place = table[spec.weight]
            found.setdefault(place.name, []).append((place.expert or 0, place.row or 0, spec))
    return [_stacked(name, parts, arch) for name, parts in found.items()]


def actor_layout(arch: Architecture, policy: Policy) -> list[Output]:
    """The actor's parameters: hyper-connections are modules, experts stacked in `w13` and `w2`."""
    outputs: dict[str, Output] = {}
    table = places(arch, "megatron")
    for spec in tensor_specs(arch, policy=policy).values():
        name, index = table[spec.name].name, _index(table[spec.name])
        piece = Piece(spec.name, spec.weight, index)
        if not index:
            outputs[name] = Output(name, spec.dtype, spec.shape, (piece,))
            continue
        stack = (arch.n_routed_experts, 2) if len(index) == 2 else (arch.n_routed_experts,)
        old = outputs.get(name) or Output(name, spec.dtype, (*stack, *spec.shape), ())
        outputs[name] = replace(old, pieces=(*old.pieces, piece))
    return [_in_order(output) for output in outputs.values()]


def without_mtp(arch: Architecture) -> Architecture:
    """The same model without its multi-token prediction blocks."""
    ratios = arch.compress_ratios[: arch.num_hidden_layers]
    return replace(arch, num_nextn_predict_layers=0, compress_ratios=ratios)


def shards(outputs: list[Output], max_bytes: int) -> Iterator[list[Output]]:
    """Outputs in groups of at most `max_bytes`, unless a matrix with its scales is larger."""
    shard: list[Output] = []
    filled = 0
    for matrix in _matrices(outputs):
        size = sum(output.num_bytes for output in matrix)
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard += matrix
        filled += size
    yield shard


def _matrices(outputs: list[Output]) -> Iterator[list[Output]]:
    """Codes and the scales that follow them belong together."""
    together: list[Output] = []
    for output in outputs:
        if together and output.pieces[0].weight != together[0].pieces[0].weight:
            yield together
            together = []
        together.append(output)
    yield together


def _stacked(name: str, parts: list[tuple[int, int, TensorSpec]], arch: Architecture) -> Output:
    parts = sorted(parts, key=lambda part: part[:2])
    spec = parts[0][2]
    pieces = tuple(Piece(part.name, part.weight, (expert, row)) for expert, row, part in parts)
    if len(parts) == 1:
        return Output(name, spec.dtype, spec.shape, (replace(pieces[0], index=()),))
    rows = len(parts) // arch.n_routed_experts * spec.shape[0]
    shape = (arch.n_routed_experts, rows, *spec.shape[1:])
    return Output(name, spec.dtype, shape, pieces)


def _index(place: Place) -> tuple[int, ...]:
    return tuple(part for part in (place.expert, place.row) if part is not None)


def _in_order(output: Output) -> Output:
    return replace(output, pieces=tuple(sorted(output.pieces, key=lambda piece: piece.index)))
