"""FP4 weights: E2M1 codes, two a byte, one E8M0 scale per 32 values along K.

The low nibble holds the even K index. A swap permutes values inside a scale group, so no statistic
shows it: only outputs do. Tensors on a GPU go through fused kernels that give the same bytes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from shared.quant.fp8 import (
    BLOCK,
    E8M0_BIAS,
    MIN_EXPONENT,
    check_scale_dtype,
    power_of_two,
    scale_values,
)

GROUP = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code = sign · 8 + index
MAX_LOSSLESS_SPREAD = 14  # exponents inside one FP8 block, for the conversion to be exact

_HEADROOM = 6  # FP8 codes reach 6 · 2^6 = 384 < 448
_OUT_OF_REACH = 32  # shifted down so far no code is one of FP8; much further none is one of FP32


def quantise_fp4(weight_NK: Tensor, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """Packed codes (int8, [..., N, K/2]) and scales (E8M0, [..., N, K/32]).

    K must be a multiple of 32; leading dims stack matrices, which a GPU takes in one launch. A NaN
    or an infinity is a ValueError that names the tensor.
    """
    if weight_NK.shape[-1] % GROUP:
        columns = weight_NK.shape[-1]
        raise ValueError(f"{name}: expected K to be a multiple of {GROUP}, found {columns}")
    if weight_NK.is_cuda:
        from shared.quant.kernels import fp4 as kernels

        fused = kernels.quantise(weight_NK)
        if fused is not None:
            return fused
    return plain_quantise_fp4(weight_NK, name=name)


def dequantise_fp4(packed: Tensor, scale: Tensor, *, name: str = "tensor") -> Tensor:
    """FP32 values [..., N, K] of packed codes [..., N, K/2] (int8 or uint8) and their scales."""
    _check_scale(packed, scale, name)
    if packed.is_cuda:
        from shared.quant.kernels import fp4 as kernels

        fused = kernels.dequantise(packed, scale)
        if fused is not None:
            return fused
    return plain_dequantise_fp4(packed, scale, name=name)


def plain_quantise_fp4(weight_NK: Tensor, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """`quantise_fp4` in torch's own operations, on any device."""
    groups = weight_NK.float().unflatten(-1, (weight_NK.shape[-1] // GROUP, GROUP))
    peak = torch.maximum(groups.amax(-1), -groups.amin(-1))
    if not peak.isfinite().all():
        *rows, group = (~peak.isfinite()).nonzero()[0].tolist()
        row = rows[0] if len(rows) == 1 else tuple(rows)
        raise ValueError(f"{name}: NaN or infinity in row {row}, group {group}")
    exponent = e2m1_exponent(peak)
    codes = e2m1_codes(groups * power_of_two(-exponent)[..., None]).view(weight_NK.shape)
    return plain_pack_nibbles(codes), power_of_two(exponent).to(torch.float8_e8m0fnu)


def plain_dequantise_fp4(packed: Tensor, scale: Tensor, *, name: str = "tensor") -> Tensor:
    """`dequantise_fp4` in torch's own operations, on any device."""
    values = e2m1_values(packed).unflatten(-1, (scale.shape[-1], GROUP))
    return (values * scale_values(scale, name=name)[..., None]).flatten(-2)


def fp4_to_fp8(packed: Tensor, scale: Tensor, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """The same values as E4M3 in 128x128 blocks; raises ValueError if any would change.

    The block's scale is its largest group scale / 64, so that a code becomes code · (scale / S).
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    _check_scale(packed, scale, name)
    values = e2m1_values(packed).view(rows, -1, GROUP)
    exponent = scale.view(torch.uint8).int() - E8M0_BIAS
    scale_values(scale, name=name)
    used = (values != 0).any(-1)
    high = _block_max(torch.where(used, exponent, -(2**30)))
    block_exponent = torch.where(high == -(2**30), 0, high - _HEADROOM).clamp_(-E8M0_BIAS)
    shift = (exponent - _spread(block_exponent, exponent.shape)).clamp_(min=-_OUT_OF_REACH)
    shifted = values * torch.exp2(torch.where(used, shift, 0).float())[..., None]
    codes = shifted.to(torch.float8_e4m3fn)
    _refuse_loss(codes.float() != shifted, used, exponent, name)
    return codes.view(rows, columns), power_of_two(block_exponent).to(torch.float8_e8m0fnu)


def e2m1_exponent(absolute_max: Tensor) -> Tensor:
    """int32 ⌈log2(max(amax, 6·2^-126) / 6)⌉, exactly."""
    mantissa, exponent = torch.frexp(absolute_max)
    rounded_up = exponent - 3 + (mantissa > 0.75).to(exponent.dtype)
    return torch.where(absolute_max == 0, MIN_EXPONENT, rounded_up).clamp_(min=MIN_EXPONENT)


def e2m1_codes(values: Tensor) -> Tensor:
    """uint8 codes of values in [-6, 6]: nearest, ties to the even code."""
    codes = _e2m1_index(values.abs()).to(torch.uint8)
    return codes.bitwise_or_(torch.signbit(values).to(torch.uint8).mul_(8))


def round_e2m1(values: Tensor) -> Tensor:
    """The same values on the grid, without the detour over codes."""
    index = _e2m1_index(values.abs())
    grid = (index / 2).clamp_(min=index - 2).clamp_(min=index.mul_(2).sub_(8))
    return grid.copysign_(values)


def _e2m1_index(magnitude: Tensor) -> Tensor:
    # The grid has steps of 1/2 to 2, of 1 to 4 and of 2 to 6. Beyond its own stretch each rounded
    # line lies above the others; it starts at an even code, so rounding half to even fits all.
    index = (2 * magnitude).round_()
    index.clamp_(max=magnitude.round().add_(2))
    return index.clamp_(max=(magnitude / 2).round_().add_(4))


def e2m1_values(packed: Tensor) -> Tensor:
    """FP32 values [..., K] of packed codes [..., K/2]: one look-up for the two of a byte."""
    single = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=packed.device)
    pairs = torch.stack((single.repeat(16), single.repeat_interleave(16)), 1)
    return functional.embedding(packed.view(torch.uint8).int(), pairs).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 [..., K/2] from uint8 codes [..., K]; ValueError if K is odd."""
    if codes.shape[-1] % 2:
        raise ValueError(f"expected an even number of codes in a row, found {codes.shape[-1]}")
    if codes.is_cuda:
        from shared.quant.kernels import fp4 as kernels

        return kernels.pack(codes)
    return plain_pack_nibbles(codes)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 codes [..., K] from bytes [..., K/2]."""
    if packed.is_cuda:
        from shared.quant.kernels import fp4 as kernels

        return kernels.unpack(packed)
    return plain_unpack_nibbles(packed)


def plain_pack_nibbles(codes: Tensor) -> Tensor:
    """`pack_nibbles` in torch's own operations, on any device."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def plain_unpack_nibbles(packed: Tensor) -> Tensor:
    """`unpack_nibbles` in torch's own operations, on any device."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)


def _check_scale(packed: Tensor, scale: Tensor, name: str) -> None:
    *lead, half = packed.shape
    expected = (*lead, 2 * half // GROUP)
    if 2 * half % GROUP or tuple(scale.shape) != expected:
        raise ValueError(f"{name}: expected scales of shape {expected}, found {tuple(scale.shape)}")
    check_scale_dtype(scale, name)


def _block_max(exponent: Tensor) -> Tensor:
    """Largest exponent of every 128x128 block, from one per row and 32 columns."""
    rows, groups = exponent.shape
    per_block = BLOCK // GROUP
    padding = (0, -groups % per_block, 0, -rows % BLOCK)
    padded = functional.pad(exponent, padding, value=-(2**30))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // per_block, per_block)
    return blocks.amax((1, 3))


def _spread(block_exponent: Tensor, shape: torch.Size) -> Tensor:
    rows = block_exponent.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK // GROUP, 1)[:, : shape[1]]


def _refuse_loss(changed: Tensor, used: Tensor, exponent: Tensor, name: str) -> None:
    if not changed.any():
        return
    row, group, _ = changed.nonzero()[0].tolist()
    block = (row // BLOCK, group // (BLOCK // GROUP))
    where = (
        slice(block[0] * BLOCK, (block[0] + 1) * BLOCK),
        slice(block[1] * BLOCK // GROUP, (block[1] + 1) * BLOCK // GROUP),
    )
    found = exponent[where][used[where]]
    raise ValueError(
        f"{name}: scale exponents of block {block} differ by {int(found.max() - found.min())}, "
        f"FP8 keeps FP4 values up to {MAX_LOSSLESS_SPREAD}"
    )
