"""FP8 weights: E4M3 codes in 128x128 blocks, one power-of-two scale a block.

The scale is rounded up before anything is quantised with it, so no code saturates and the stored
scale is the one that was used; rounding it afterwards costs an order of magnitude in error.
Tensors on a GPU go through a fused kernel that gives the same bytes.
"""

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

BLOCK = 128
E4M3_MAX = 448.0  # 0.875 · 2^9
E8M0_BIAS = 127
MIN_EXPONENT = -126  # keeps scale and 1/scale normal numbers in FP32

_E4M3_NAN = 0x7F  # sign cleared; the format has no infinity


def quantise_fp8(
    weight_NK: Tensor, *, name: str = "tensor", scale_dtype: torch.dtype = torch.float8_e8m0fnu
) -> tuple[Tensor, Tensor]:
    """Codes (E4M3, [..., N, K]) and scales ([..., ceil(N/128), ceil(K/128)], E8M0 or FP32).

    Edge blocks may be partial; leading dims stack matrices, which a GPU takes in one launch. A NaN
    or an infinity is a ValueError that names the tensor.
    """
    if weight_NK.is_cuda:
        from shared.quant.kernels import fp8 as kernels

        fused = kernels.quantise(weight_NK, scale_dtype=scale_dtype)
        if fused is not None:
            return fused
    return plain_quantise_fp8(weight_NK, name=name, scale_dtype=scale_dtype)


def dequantise_fp8(codes_NK: Tensor, scale: Tensor, *, name: str = "tensor") -> Tensor:
    """FP32 values of E4M3 codes; `scale` is E8M0 (an exponent, not a number) or FP32."""
    _check_scale(codes_NK, scale, name)
    if codes_NK.is_cuda:
        from shared.quant.kernels import fp8 as kernels

        fused = kernels.dequantise(codes_NK, scale)
        if fused is not None:
            return fused
    return plain_dequantise_fp8(codes_NK, scale, name=name)


def plain_quantise_fp8(
    weight_NK: Tensor, *, name: str = "tensor", scale_dtype: torch.dtype = torch.float8_e8m0fnu
) -> tuple[Tensor, Tensor]:
    """`quantise_fp8` in torch's own operations, on any device."""
    blocks = _as_blocks(weight_NK.float())
    exponent = e4m3_exponent(_absolute_max(blocks, name))
    codes = (blocks * power_of_two(-exponent)[..., None, :, None]).to(torch.float8_e4m3fn)
    return _from_blocks(codes, weight_NK.shape), power_of_two(exponent).to(scale_dtype)


def plain_dequantise_fp8(codes_NK: Tensor, scale: Tensor, *, name: str = "tensor") -> Tensor:
    """`dequantise_fp8` in torch's own operations, on any device."""
    _refuse_bad_codes(codes_NK, name)
    values = _as_blocks(e4m3_values(codes_NK))
    values *= scale_values(scale, name=name)[..., None, :, None]
    return _from_blocks(values, codes_NK.shape)


def e4m3_values(codes: Tensor) -> Tensor:
    """FP32 values of finite E4M3 codes, as `codes.float()` gives them.

    torch converts them one by one on a CPU; here two at a time are looked up, which takes one pass
    over memory and lets other threads run meanwhile.
    """
    if codes.device.type != "cpu":
        return codes.float()
    raw = codes.contiguous().view(torch.uint8).numpy().reshape(-1)
    if raw.size % 2:
        values = _e4m3_pairs().view(np.float32)[: 2 * 256 : 2].take(raw)
    else:
        values = _e4m3_pairs().take(raw.view("<u2")).view(np.float32)
    return torch.from_numpy(values).view(codes.shape)


@cache
def _e4m3_pairs() -> NDArray[np.uint64]:
    """By two neighbouring codes, the first in the low byte: their FP32 values, the first first.

    FP16 has the same fields one exponent bit wider: moved there, a code is its value / 2^8 (the
    biases are 7 and 15), subnormal or not.
    """
    codes = np.arange(256, dtype=np.uint8)
    halves = (codes.view(np.int8).astype(np.int16) << 7) & ~0x4000  # the sign came twice
    singles = halves.view(np.float16).astype(np.float32) * np.float32(2.0**8)
    pairs = np.empty((256, 256, 2), np.float32)
    pairs[..., 0], pairs[..., 1] = singles[None, :], singles[:, None]
    return pairs.reshape(-1).view(np.uint64)


def e4m3_exponent(absolute_max: Tensor) -> Tensor:
    """int32 ⌈log2(amax / 448)⌉, exactly; 0 where a group is all zeros."""
    mantissa, exponent = torch.frexp(absolute_max)
    rounded_up = exponent - 9 + (mantissa > E4M3_MAX / 512).to(exponent.dtype)
    return torch.where(absolute_max == 0, 0, rounded_up).clamp_(min=MIN_EXPONENT)


def power_of_two(exponent: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^exponent for int32 exponents in [-127, 127], exactly."""
    return (exponent + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu).to(dtype)


def scale_values(scale: Tensor, *, name: str = "tensor") -> Tensor:
    """Scales as FP32 numbers; E8M0 byte 255 and other non-finite scales are refused."""
    check_scale_dtype(scale, name)
    values = scale.float()
    if not values.isfinite().all():
        raise ValueError(f"{name}: expected finite scales, found NaN or infinity")
    return values


def check_scale_dtype(scale: Tensor, name: str) -> None:
    if scale.dtype not in (torch.float8_e8m0fnu, torch.float32):
        raise ValueError(f"{name}: expected scales in E8M0 or FP32, found {scale.dtype}")


def _check_scale(codes: Tensor, scale: Tensor, name: str) -> None:
    *lead, rows, columns = codes.shape
    expected = (*lead, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"{name}: expected scales of shape {expected}, found {tuple(scale.shape)}")
    check_scale_dtype(scale, name)


def _absolute_max(blocks: Tensor, name: str) -> Tensor:
    peak = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).amax(-2)
    if not peak.isfinite().all():
        place = tuple((~peak.isfinite()).nonzero()[0].tolist())
        raise ValueError(f"{name}: NaN or infinity in block {place}, cannot be quantised")
    return peak


def _refuse_bad_codes(codes: Tensor, name: str) -> None:
    if codes.numel() and (codes.view(torch.uint8) & _E4M3_NAN).amax() == _E4M3_NAN:
        raise ValueError(f"{name}: expected finite E4M3 codes, found NaN")


def _as_blocks(matrix_NK: Tensor) -> Tensor:
    """[..., N/128, 128, K/128, 128]; zeros fill the edge blocks."""
    *lead, rows, columns = matrix_NK.shape
    padding = (-columns % BLOCK, -rows % BLOCK)
    if any(padding):
        matrix_NK = functional.pad(matrix_NK, (0, padding[0], 0, padding[1]))
    down, across = (rows + padding[1]) // BLOCK, (columns + padding[0]) // BLOCK
    return matrix_NK.reshape(*lead, down, BLOCK, across, BLOCK)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    *lead, down, _, across, _ = blocks.shape
    matrix = blocks.reshape(*lead, down * BLOCK, across * BLOCK)
    return matrix[..., : shape[-2], : shape[-1]].contiguous()
