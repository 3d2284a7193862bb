"""Fake quantisation for the decode loop: the values of `shared/quant/activation.py`, faster.

Rounding to m mantissa bits is one addition: x + M - M, with M so large that its last bit is worth
the step that x must land on. Scales are powers of two, so nothing is ever divided by one. Inputs
must be finite, there is no gradient, and anything but float32 goes the plain way.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared.quant import activation


@dataclass(frozen=True, slots=True)
class _Grid:
    """A small float format whose largest value is `peak` · 2^`peak_exponent`, 1 <= peak < 2."""

    mantissa_bits: int
    peak: float
    peak_exponent: int
    min_exponent: int  # of the smallest normal number
    floor: float  # smallest absolute maximum that a scale is made from


_E4M3 = _Grid(3, 1.75, 8, -6, activation.E4M3_FLOOR)
_E2M1 = _Grid(1, 1.5, 2, 0, 6 * 2.0**-126)

_BITS = 23  # of a float32's mantissa
_EXPONENT = 0x7F800000


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


def _round(x: Tensor, group: int, grid: _Grid) -> Tensor:
    width = x.shape[-1]
    group = min(group, width)
    if width % group:  # the last group is shorter
        whole = width - width % group
        parts = (_round(x[..., :whole], group, grid), _round(x[..., whole:], group, grid))
        return torch.cat(parts, dim=-1)
    groups = x.reshape(*x.shape[:-1], width // group, group)
    return _round_groups(groups, grid).view(x.shape)


def _round_groups(groups: Tensor, grid: _Grid) -> Tensor:
    peak = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True))
    peak = peak.clamp_(min=grid.floor)
    # 2^⌈log2(peak / largest)⌉ without a logarithm: carry into the exponent if the mantissa is above
    # that of the format's largest value, then drop the mantissa.
    carry = (1 << _BITS) - int((grid.peak - 1) * (1 << _BITS)) - 1
    rounded_up = ((peak.view(torch.int32) + carry) & _EXPONENT).view(torch.float32)
    smallest_normal = rounded_up * 2.0 ** (grid.min_exponent - grid.peak_exponent)
    power = (groups.view(torch.int32) & _EXPONENT).view(torch.float32)  # 2^⌊log2|x|⌋
    magic = torch.maximum(power, smallest_normal).mul_(1.5 * 2.0 ** (_BITS - grid.mantissa_bits))
    return (groups + magic).sub_(magic)
