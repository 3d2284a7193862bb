"""FP8 products on any device: operands go to E4M3 and back, products and sums are FP32.

The recipe of DeepSeek-V3's report (arXiv 2412.19437, section 3.3): E4M3 everywhere, activations and
gradients with a scale for 128 values along the summed dimension, weights for blocks of 128x128. A
weight gradient is a sum over tokens, so its operands are rounded in groups of 128 tokens, anew from
what was kept: nothing is rounded twice. The last group or block may be shorter.
"""

# T tokens, K input width, N output width
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shared.quant.activation import E4M3_FLOOR
from shared.quant.fast_activation import round_e4m3
from shared.quant.fp8 import BLOCK, E4M3_MAX, e4m3_exponent, power_of_two
from shared.quant.policy import ScaleType

# Smallest absolute maximum that a scale is made from: of activations that of the release, so that
# they are rounded as a sampler rounds them; weights and gradients may be far smaller.
TINY = 2.0**-100


@dataclass(frozen=True, slots=True)
class EmulatedFp8:
    """`scale`: powers of two, rounded up (`e8m0`), or the exact quotient in FP32."""

    scale: ScaleType = "e8m0"

    def forward(self, x_TK: Tensor, weight_NK: Tensor, *, out: Tensor | None = None) -> Tensor:
        x, weight = self._groups(x_TK, E4M3_FLOOR), self._blocks(weight_NK)
        return _product(x, weight.t(), out, like=x_TK)

    def input_gradient(
        self, grad_TN: Tensor, weight_NK: Tensor, *, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        grad, weight = self._groups(grad_TN, TINY), self._blocks(weight_NK)
        if add and out is not None:
            return out.add_(_product(grad, weight, None, like=grad_TN))
        return _product(grad, weight, out, like=grad_TN)

    def weight_gradient(
        self, grad_TN: Tensor, x_TK: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        grad, x = self._groups(grad_TN.t(), TINY), self._groups(x_TK.t(), E4M3_FLOOR)
        return _product(grad, x.t(), out, like=grad_TN)

    def _groups(self, rows: Tensor, floor: float) -> Tensor:
        """In groups of 128 along the last dimension."""
        number, width = rows.shape
        padded = pad(_wide(rows), (0, -width % BLOCK)) if width % BLOCK else _wide(rows)
        groups = padded.reshape(number, -(-width // BLOCK), BLOCK)
        return self._round(groups, (2,), floor).view(padded.shape)[:, :width]

    def _blocks(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        ragged = rows % BLOCK or columns % BLOCK
        padded = pad(_wide(weight), (0, -columns % BLOCK, 0, -rows % BLOCK)) if ragged else weight
        blocks = _wide(padded).reshape(-(-rows // BLOCK), BLOCK, -1, BLOCK)
        return self._round(blocks, (1, 3), TINY).reshape(padded.shape)[:rows, :columns]

    def _round(self, groups: Tensor, dims: tuple[int, ...], floor: float) -> Tensor:
        if self.scale == "e8m0" and groups.dtype == torch.float32:
            return round_e4m3(groups, dims=dims, floor=floor)
        return plain_round_e4m3(groups, dims=dims, floor=floor, scale=self.scale)


def plain_round_e4m3(
    groups: Tensor, *, dims: tuple[int, ...], floor: float, scale: ScaleType
) -> Tensor:
    """Values of `groups` on the E4M3 grid; those that differ only along `dims` share a scale."""
    peak = groups.abs().amax(dims, keepdim=True).clamp(min=floor)
    if scale == "e8m0":
        unit = power_of_two(e4m3_exponent(peak), dtype=groups.dtype)
    else:
        unit = peak / E4M3_MAX
    codes = (groups / unit).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.to(groups.dtype) * unit


def _product(a: Tensor, b: Tensor, out: Tensor | None, *, like: Tensor) -> Tensor:
    if out is None:
        return torch.mm(a, b).to(like.dtype)
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return out.copy_(torch.mm(a, b))


def _wide(x: Tensor) -> Tensor:
    """In FP32; or FP64, for gradient checks."""
    return x if x.dtype == torch.float64 else x.float()
