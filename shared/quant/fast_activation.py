"""Fake quantisation for inner loops: the values of `shared/quant/activation.py`, faster.

Rounding to m mantissa bits is one addition: x + M - M, with M so large that its last bit is worth
the step that x must land on. Scales are powers of two, so nothing is ever divided by one. Inputs
must be finite, there is no gradient, and anything but float32 goes the plain way.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared.quant import activation

_BITS = 23  # of a float32's mantissa


@dataclass(frozen=True, slots=True)
class _Grid:
    """A small float format. Its constants are tensors: numbers cost more than the operation."""

    carry: Tensor  # int32
    smallest_share: Tensor  # smallest normal number / 2^exponent of the largest
    magic: float
    floor: float  # smallest absolute maximum that a scale is made from


def _grid(
    *, mantissa_bits: int, peak: float, peak_exponent: int, min_exponent: int, floor: float
) -> _Grid:
    """The format whose largest value is peak · 2^peak_exponent, 1 <= peak < 2."""
    return _Grid(
        carry=torch.tensor((1 << _BITS) - int((peak - 1) * (1 << _BITS)) - 1, dtype=torch.int32),
        smallest_share=torch.tensor(2.0 ** (min_exponent - peak_exponent)),
        magic=1.5 * 2.0 ** (_BITS - mantissa_bits),
        floor=floor,
    )


_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_E4M3 = _grid(
    mantissa_bits=3, peak=1.75, peak_exponent=8, min_exponent=-6, floor=activation.E4M3_FLOOR
)
_E2M1 = _grid(mantissa_bits=1, peak=1.5, peak_exponent=2, min_exponent=0, floor=6 * 2.0**-126)


def round_linear_input(x: Tensor) -> Tensor:
    """E4M3 per row and 128 channels of x [..., K]."""
    if x.dtype != torch.float32:
        return activation.quantise_linear_input(x)
    return _round(x, activation.LINEAR_GROUP, _E4M3)


def round_kv(nope: Tensor) -> Tensor:
    """E4M3 in groups of 64, for the positionless dims alone."""
    if nope.dtype != torch.float32:
        return activation.quantise_kv(nope)
    return _round(nope, activation.KV_GROUP, _E4M3)


def round_indexer(x: Tensor, *, form: Literal["none", "fp8", "fp4"]) -> Tensor:
    """Hadamard rotation, then rounding: indexer queries and entries after RoPE."""
    if form == "none" or x.dtype != torch.float32:
        return activation.quantise_indexer(x, form=form)
    if form == "fp4":
        return _round(activation.hadamard(x), activation.INDEXER_FP4_GROUP, _E2M1)
    return _round(activation.hadamard(x), activation.INDEXER_FP8_GROUP, _E4M3)


def round_e4m3(groups: Tensor, *, dims: tuple[int, ...], floor: float) -> Tensor:
    """To E4M3 where values of float32 `groups` that differ only along `dims` share a scale, made
    from their absolute maximum or from `floor`."""
    return _round_groups(groups, _E4M3, dims, floor)


def _round(x: Tensor, group: int, grid: _Grid) -> Tensor:
    width = x.shape[-1]
    group = min(group, width)
    if width % group:  # the last group is shorter
        whole = width - width % group
        parts = (_round(x[..., :whole], group, grid), _round(x[..., whole:], group, grid))
        return torch.cat(parts, dim=-1)
    groups = x.reshape(*x.shape[:-1], width // group, group)
    return _round_groups(groups, grid, (-1,), grid.floor).view(x.shape)


def _round_groups(groups: Tensor, grid: _Grid, dims: tuple[int, ...], floor: float) -> Tensor:
    # 2^⌈log2(peak / largest)⌉ without a logarithm: carry into the exponent if the mantissa is above
    # that of the format's largest value, then drop the mantissa.
    peak = groups.abs().amax(dims, keepdim=True).clamp_(min=floor).view(torch.int32)
    rounded_up = peak.add_(grid.carry).bitwise_and_(_EXPONENT).view(torch.float32)
    smallest_normal = rounded_up.mul_(grid.smallest_share)
    power = groups.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # 2^⌊log2|x|⌋
    torch.maximum(power, smallest_normal, out=power)
    return torch.add(groups, power, alpha=grid.magic).sub_(power, alpha=grid.magic)
