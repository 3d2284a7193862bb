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
GROUPS = 64  # of one program
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
                packed.view(torch.int32),
                scale.view(torch.uint8),
                flag,
                count,
                GROUPS=GROUPS,
                num_warps=1,
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
                num_warps=2,
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
    """`packed` is written by words of eight codes, four to a group."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    column = tl.arange(0, 32)[None, :]
    raw = tl.load(weight + group[:, None] * 32 + column, mask=inside[:, None], other=0.0)
    bits = raw.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    peak = tl.max(magnitude, 1)
    # ⌈log2(peak / 6)⌉: 6 = 1.5 · 2^2, and zeros count as 6 · 2^-126.
    exponent = tl.maximum((peak >> 23) - 129 + ((peak & 0x7FFFFF) > 0x400000).to(tl.int32), -126)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    index = _e2m1_index(magnitude.to(tl.float32, bitcast=True), inverse)
    codes = ((index & 7) | ((bits >> 28) & 8)) << (column % 8 * 4)
    words = tl.sum(tl.reshape(codes, (GROUPS, 4, 8)), 2)
    target = packed + group[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(target, words, mask=inside[:, None])
    tl.store(scale + group, (exponent + 127).to(tl.uint8), mask=inside)
    tl.store(flag + tl.zeros_like(peak), 1, mask=peak >= 0x7F800000)


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
    tl.store(flag + tl.zeros_like(bits), 1, mask=bad)


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
def _e2m1_index(magnitude, inverse):
    """Codes without a sign, in the low bits, of magnitude · inverse <= 6; ties to the even code.

    The grid has steps of 1/2 to 2, of 1 to 4 and of 2 to 6; beyond its own stretch each rounded
    line lies above the others. Added to 2^23, whose last bit is worth 1, a line is rounded to its
    integers, which stand in the low bits.
    """
    halves = magnitude * (2 * inverse) + 8388608.0
    ones = magnitude * inverse + 8388610.0
    twos = magnitude * (0.5 * inverse) + 8388612.0
    return tl.minimum(tl.minimum(halves, ones), twos).to(tl.int32, bitcast=True)


@triton.jit
def _value(code):
    """FP32 values of int32 codes."""
    index = code & 7
    half = tl.where(index == 0, 0, 0x3F000000)
    bits = tl.where(index < 2, half, ((index >> 1) + 126) << 23 | (index & 1) << 22)
    return (bits | (code & 8) << 28).to(tl.float32, bitcast=True)
