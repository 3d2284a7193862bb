"""`shared/quant/fp4.py` in one pass over memory each: a program takes some groups of 32 values.

Groups lie along the last dim of a contiguous tensor, so its shape does not matter, and a stack of
matrices is one launch. Exponents and codes come from the bits of FP32 numbers, so they are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.quant.kernels.launch import device_of, new_flag

GROUP = 32
GROUPS = 128  # of one program
PAIRS = 4096


def quantise(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packed codes and scales as `quantise_fp4`; None if a value is NaN or infinite."""
    *lead, columns = weight.shape
    device, flag = weight.device, new_flag(weight)
    packed = torch.empty(*lead, columns // 2, dtype=torch.int8, device=device)
    scale = torch.empty(*lead, columns // GROUP, dtype=torch.float8_e8m0fnu, device=device)
    if count := scale.numel():
        with device_of(weight):
            _quantise[(triton.cdiv(count, GROUPS),)](
                weight.contiguous(),
                packed.view(torch.uint8),
                scale.view(torch.uint8),
                flag,
                count,
                GROUPS=GROUPS,
                num_warps=4,
            )
    return None if flag.item() else (packed, scale)


def dequantise(packed: Tensor, scale: Tensor) -> Tensor | None:
    """FP32 values as `dequantise_fp4`; None if a scale is not finite."""
    *lead, half = packed.shape
    values = torch.empty(*lead, 2 * half, dtype=torch.float32, device=packed.device)
    flag = new_flag(packed)
    wide = scale.dtype == torch.float32
    if count := scale.numel():
        with device_of(packed):
            _dequantise[(triton.cdiv(count, GROUPS),)](
                packed.contiguous().view(torch.uint8),
                scale.contiguous().view(torch.int32 if wide else torch.uint8),
                values,
                flag,
                count,
                WIDE_SCALE=wide,
                GROUPS=GROUPS,
                num_warps=4,
            )
    return None if flag.item() else values


def pack(codes: Tensor) -> Tensor:
    """int8 `[..., K/2]` as `pack_nibbles`."""
    *lead, columns = codes.shape
    packed = torch.empty(*lead, columns // 2, dtype=torch.int8, device=codes.device)
    if count := packed.numel():
        with device_of(codes):
            _pack[(triton.cdiv(count, PAIRS),)](
                codes.contiguous(), packed.view(torch.uint8), count, PAIRS=PAIRS
            )
    return packed


def unpack(packed: Tensor) -> Tensor:
    """uint8 codes `[..., K]` as `unpack_nibbles`."""
    *lead, half = packed.shape
    codes = torch.empty(*lead, 2 * half, dtype=torch.uint8, device=packed.device)
    if count := packed.numel():
        with device_of(packed):
            _unpack[(triton.cdiv(count, PAIRS),)](
                packed.contiguous().view(torch.uint8), codes, count, PAIRS=PAIRS
            )
    return codes


@triton.jit
def _quantise(weight, packed, scale, flag, count, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    source = weight + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    peak = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    # ⌈log2(peak / 6)⌉: 6 = 1.5 · 2^2, and zeros count as 6 · 2^-126.
    exponent = tl.maximum((peak >> 23) - 129 + ((peak & 0x7FFFFF) > 0x400000).to(tl.int32), -126)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.reshape(_e2m1(values * inverse[:, None]), (GROUPS, 16, 2)))
    target = packed + group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(target, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scale + group, (exponent + 127).to(tl.uint8), mask=inside)
    tl.store(flag, 1, mask=tl.max(peak, 0) >= 0x7F800000)


@triton.jit
def _dequantise(packed, scale, values, flag, count, WIDE_SCALE: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    source = packed + group[:, None] * 16 + tl.arange(0, 16)[None, :]
    pair = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    bits = tl.load(scale + group, mask=inside, other=0).to(tl.int32)
    if WIDE_SCALE:
        bad = (bits & 0x7FFFFFFF) >= 0x7F800000
    else:
        bad = bits == 255
        bits = tl.where(bits == 0, 0x400000, bits << 23)  # 2^-127 is no normal number
    code = tl.reshape(tl.join(pair & 0xF, pair >> 4), (GROUPS, 32))
    result = _value(code) * bits.to(tl.float32, bitcast=True)[:, None]
    target = values + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, result, mask=inside[:, None])
    tl.store(flag, 1, mask=tl.max(bad.to(tl.int32), 0) == 1)


@triton.jit
def _pack(codes, packed, count, PAIRS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * PAIRS
    pair = first + tl.arange(0, PAIRS)
    single = 2 * first + tl.arange(0, 2 * PAIRS)
    both = tl.load(codes + single, mask=single < 2 * count, other=0)
    low, high = tl.split(tl.reshape(both, (PAIRS, 2)))
    tl.store(packed + pair, low | (high << 4), mask=pair < count)


@triton.jit
def _unpack(packed, codes, count, PAIRS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * PAIRS
    pair = first + tl.arange(0, PAIRS)
    single = 2 * first + tl.arange(0, 2 * PAIRS)
    both = tl.load(packed + pair, mask=pair < count, other=0)
    found = tl.reshape(tl.join(both & 0xF, both >> 4), (2 * PAIRS,))
    tl.store(codes + single, found, mask=single < 2 * count)


@triton.jit
def _e2m1(values):
    """int32 codes of values within ±6, rounded to nearest, ties to the even code."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 1 on a code is exponent and first bit of the mantissa. Below, adding 2^22, whose last bit
    # is worth a half, rounds to halves.
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - (126 << 1)
    halves = (tl.abs(values) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(magnitude < 0x3F800000, halves, normal) | ((bits >> 28) & 8)


@triton.jit
def _value(code):
    """FP32 values of int32 codes."""
    index = code & 7
    half = tl.where(index == 0, 0, 0x3F000000)
    bits = tl.where(index < 2, half, ((index >> 1) + 126) << 23 | (index & 1) << 22)
    return (bits | (code & 8) << 28).to(tl.float32, bitcast=True)
