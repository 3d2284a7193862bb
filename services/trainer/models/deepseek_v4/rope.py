"""Rotary positions of DeepSeek-V4: adjacent pairs of the trailing channels turn together, in FP32.

Which table a layer uses (plain, or YaRN for compressed layers) is the architecture's business.
Rotations are orthogonal, so every backward pass is the inverse rotation.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from services.trainer.models.deepseek_v4 import context
from services.trainer.models.deepseek_v4.layers import inverse_rms, row_dots, wide
from shared.models.deepseek_v4.architecture import Architecture


@functools.lru_cache(maxsize=32)
def rotations(frequencies: tuple[float, ...], length: int, device: torch.device) -> Tensor:
    """`[length, pairs]` complex64: how far every pair has turned at positions 0, 1, …"""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float32))
    return torch.polar(torch.ones_like(angles), angles).to(device)


def layer_rotations(architecture: Architecture, layer: int, like: Tensor) -> Tensor:
    """The table of one layer for `like` `[B, S, …]`, this rank's tokens: `[S, pairs]`."""
    start = context.first(like.size(1))
    stop = start + like.size(1)
    length = -(-stop // 128) * 128  # few distinct tables, so that the cache serves them
    return rotations(architecture.rope_frequencies(layer), length, like.device)[start:stop]


def rotate(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2 · turns.size(-1)` channels of `x`; `turns` broadcasts over the rest."""
    return _Rotate.apply(x, turns.conj() if inverse else turns)


def norm_rotate(x: Tensor, turns: Tensor, eps: float) -> Tensor:
    """Weightless RMS norm over the last dimension, then the rotation (queries)."""
    return _NormRotate.apply(x, turns, eps)


def _turn_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate in place."""
    tail = x[..., -2 * turns.size(-1) :]
    if x.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(turns)
    else:
        pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
        tail.copy_(torch.view_as_real(pairs * turns).flatten(-2))
    return x


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.turns = turns
        return _turn_(x.clone(memory_format=torch.contiguous_format), turns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turn_(grad.clone(memory_format=torch.contiguous_format), ctx.turns.conj()), None


class _NormRotate(torch.autograd.Function):
    """The norm commutes with the rotation, so backward works on the rotated output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor, eps: float) -> Tensor:
        x_wide = wide(x)
        scale = inverse_rms(x_wide, eps)
        y = _turn_(x_wide * scale, turns).to(x.dtype)
        ctx.save_for_backward(y, scale)
        ctx.turns = turns
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        y, scale = ctx.saved_tensors
        y_wide, grad_wide = wide(y), wide(grad)
        along = row_dots(grad_wide, y_wide).unsqueeze(-1) / y.size(-1)
        grad_x = torch.addcmul(grad_wide, y_wide, along, value=-1).mul_(scale)
        return _turn_(grad_x, ctx.turns.conj()).to(y.dtype), None, None
