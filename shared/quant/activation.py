"""Fake quantisation of activations, as the engines that serve the release round them.

Values go to their grid and back; gradients pass straight through. All of it works in the dtype of
its input, so that quantised paths can be compared in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from shared.quant.fp4 import e2m1_exponent, round_e2m1
from shared.quant.fp8 import e4m3_exponent, power_of_two

LINEAR_GROUP = 128  # input of an FP8 or FP4 linear, per token
KV_GROUP = 64  # positionless dims of window and compressed keys
INDEXER_FP8_GROUP = 128
INDEXER_FP4_GROUP = 32
E4M3_FLOOR = 1e-4  # smallest absolute maximum the release's kernels divide by


@dataclass(frozen=True, slots=True)
class ActivationQuant:
    """Which activations are rounded; sampler and trainer must use the same one."""

    linear: bool = False
    kv: bool = False
    indexer: Literal["none", "fp8", "fp4"] = "none"


UNQUANTISED = ActivationQuant()
RELEASE = ActivationQuant(linear=True, kv=True, indexer="fp4")
"""As the release's own inference code."""
SERVED = ActivationQuant(linear=True, kv=True, indexer="fp8")
"""As SGLang serves it unless told otherwise."""


def embedded_rounding(weight_format: str, *, activations: bool) -> ActivationQuant:
    """Of the embedded engine: as the release, but a matrix that is not quantised takes its input
    as it is. `weight_format` is that of the served weights."""
    if not activations:
        return UNQUANTISED
    return replace(RELEASE, linear=weight_format in ("fp8", "fp4"))


def quantise_linear_input(x: Tensor) -> Tensor:
    """E4M3 per token and 128 channels."""
    return fake_e4m3(x, group=LINEAR_GROUP)


def quantise_kv(nope: Tensor) -> Tensor:
    """E4M3 in groups of 64, for the positionless dims alone; rotary dims stay as they are."""
    return fake_e4m3(nope, group=KV_GROUP)


def quantise_indexer(x: Tensor, *, form: Literal["none", "fp8", "fp4"]) -> Tensor:
    """Rotate by Hadamard, then round: indexer queries and entries after RoPE."""
    match form:
        case "none":
            return x  # the rotation is orthogonal: without rounding no product shows it
        case "fp8":
            return fake_e4m3(hadamard(x), group=INDEXER_FP8_GROUP)
        case "fp4":
            return fake_e2m1(hadamard(x), group=INDEXER_FP4_GROUP)


def fake_e4m3(x: Tensor, *, group: int) -> Tensor:
    """To E4M3 and back, with a power-of-two scale per `group` of the last dim.

    scale = 2^⌈log2(max(amax, 1e-4) / 448)⌉; the last group may be shorter.
    """
    return _StraightThrough.apply(x, group, _round_e4m3)


def fake_e2m1(x: Tensor, *, group: int) -> Tensor:
    """To E2M1 and back; scale = 2^⌈log2(max(amax, 6·2^-126) / 6)⌉, ties to the even code."""
    return _StraightThrough.apply(x, group, _round_e2m1)


def hadamard(x: Tensor) -> Tensor:
    """Product with the Sylvester matrix over the last dim (a power of two), scaled by n^-1/2."""
    n = x.shape[-1]
    return x @ _sylvester(n, x.dtype, x.device) * n**-0.5


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return _by_group(x, group, rounding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def _by_group(x: Tensor, group: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    width = x.shape[-1]
    padded = functional.pad(x, (0, -width % group)) if width % group else x
    groups = padded.reshape(*x.shape[:-1], -1, group)
    return rounding(groups).reshape(padded.shape)[..., :width]


def _round_e4m3(groups: Tensor) -> Tensor:
    peak = torch.maximum(groups.amax(-1), -groups.amin(-1)).clamp(min=E4M3_FLOOR)
    exponent = e4m3_exponent(peak)[..., None]
    scaled = groups * power_of_two(-exponent, dtype=groups.dtype)
    codes = scaled.to(torch.float8_e4m3fn)
    return codes.to(groups.dtype) * power_of_two(exponent, dtype=groups.dtype)


def _round_e2m1(groups: Tensor) -> Tensor:
    peak = torch.maximum(groups.amax(-1), -groups.amin(-1))
    exponent = e2m1_exponent(peak)[..., None]
    scaled = groups * power_of_two(-exponent, dtype=groups.dtype)
    return round_e2m1(scaled) * power_of_two(exponent, dtype=groups.dtype)


@lru_cache(maxsize=16)
def _sylvester(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if n < 1 or n & (n - 1):
        raise ValueError(f"Hadamard size {n} is not a power of two")
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
