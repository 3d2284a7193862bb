"""`shared/quant/fp8.py` in one pass over memory each: a program takes one 128x128 block.

Stacks of matrices `[..., N, K]` go in one launch. Exponents come from the bits of the largest
magnitude, so they are exact; integer order is the order of magnitudes, with NaN above infinity.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.quant.kernels.launch import INTERPRETED, device_of, matrices, new_flag

BLOCK = 128


def quantise(
    weight: Tensor, *, scale_dtype: torch.dtype, software: bool = INTERPRETED
) -> tuple[Tensor, Tensor] | None:
    """Codes and scales as `quantise_fp8`; None if a value is NaN or infinite.

    `software` rounds by integer arithmetic instead of the device's own conversion.
    """
    stack = matrices(weight)
    count, rows, columns = stack.shape
    down, across = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(*weight.shape[:-2], down, across, dtype=scale_dtype, device=weight.device)
    flag = new_flag(weight)
    if weight.numel():
        with device_of(weight):
            _quantise[(count * down * across,)](
                stack,
                codes.view(torch.uint8),
                _raw(scale),
                flag,
                rows,
                columns,
                *stack.stride()[:2],
                WIDE_SCALE=scale_dtype == torch.float32,
                EVEN=rows % BLOCK == 0 and columns % BLOCK == 0,
                SOFTWARE=software,
                BLOCK=BLOCK,
                num_warps=8,
            )
    return None if flag.item() else (codes, scale)


def dequantise(codes: Tensor, scale: Tensor) -> Tensor | None:
    """FP32 values as `dequantise_fp8`; None if a code is NaN or a scale not finite."""
    stack = matrices(codes.view(torch.uint8))
    count, rows, columns = stack.shape
    down, across = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    flag = new_flag(codes)
    if codes.numel():
        with device_of(codes):
            _dequantise[(count * down * across,)](
                stack,
                _raw(scale.contiguous()),
                values,
                flag,
                rows,
                columns,
                *stack.stride()[:2],
                WIDE_SCALE=scale.dtype == torch.float32,
                EVEN=rows % BLOCK == 0 and columns % BLOCK == 0,
                BLOCK=BLOCK,
                num_warps=8,
            )
    return None if flag.item() else values


def _raw(scale: Tensor) -> Tensor:
    return scale.view(torch.int32 if scale.dtype == torch.float32 else torch.uint8)


@triton.jit
def _quantise(
    weight,
    codes,
    scale,
    flag,
    rows,
    columns,
    matrix_stride,
    row_stride,
    WIDE_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    SOFTWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    matrix, row, column, inside = _block(number, rows, columns, BLOCK)
    source = weight + matrix * matrix_stride + row * row_stride + column
    target = codes + (matrix * rows + row) * columns + column
    raw = tl.load(source) if EVEN else tl.load(source, mask=inside, other=0.0)
    values = raw.to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(tl.max(bits, 1), 0)
    # ⌈log2(peak / 448)⌉: 448 = 1.75 · 2^8; 0 for a block of zeros, a normal number otherwise.
    exponent = tl.maximum((peak >> 23) - 135 + ((peak & 0x7FFFFF) > 0x600000).to(tl.int32), -126)
    exponent = tl.where(peak == 0, 0, exponent)
    scaled = values * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    if SOFTWARE:
        code = _e4m3(scaled)
    else:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if EVEN:
        tl.store(target, code)
    else:
        tl.store(target, code, mask=inside)
    if WIDE_SCALE:
        tl.store(scale + number, (exponent + 127) << 23)
    else:
        tl.store(scale + number, (exponent + 127).to(tl.uint8))
    tl.store(flag, 1, mask=peak >= 0x7F800000)


@triton.jit
def _dequantise(
    codes,
    scale,
    values,
    flag,
    rows,
    columns,
    matrix_stride,
    row_stride,
    WIDE_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    matrix, row, column, inside = _block(number, rows, columns, BLOCK)
    source = codes + matrix * matrix_stride + row * row_stride + column
    target = values + (matrix * rows + row) * columns + column
    code = tl.load(source) if EVEN else tl.load(source, mask=inside, other=0)
    bits = tl.load(scale + number).to(tl.int32)
    if WIDE_SCALE:
        bad_scale = (bits & 0x7FFFFFFF) >= 0x7F800000
    else:
        bad_scale = bits == 255
        bits = tl.where(bits == 0, 0x400000, bits << 23)  # 2^-127 is no normal number
    result = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    if EVEN:
        tl.store(target, result)
    else:
        tl.store(target, result, mask=inside)
    largest = tl.max(tl.max((code & 0x7F).to(tl.int32), 1), 0)
    tl.store(flag, 1, mask=bad_scale | (largest == 0x7F))


@triton.jit
def _block(number, rows, columns, BLOCK: tl.constexpr):
    """(matrix, rows, columns, inside) of a block; all blocks of a stack in the order of scales."""
    down, across = tl.cdiv(rows, BLOCK), tl.cdiv(columns, BLOCK)
    matrix = (number // (down * across)).to(tl.int64)
    row = number // across % down * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = number % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    return matrix, row.to(tl.int64), column, (row < rows) & (column < columns)


@triton.jit
def _e4m3(values):
    """Codes of values within ±448, rounded to nearest, ties to even, as the device converts."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Adding 2^14, whose last bit is worth 2^-9, rounds to the format's subnormal numbers.
    shifted = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, shifted, normal - (120 << 3))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
