"""Where the actor rounds activations as its sampler does; gradients go straight through.

Rounded values fit BF16, whose mantissa is longer, so activations keep their dtype.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from services.trainer.models.deepseek_v4.layers import wide
from shared.quant.activation import ActivationQuant
from shared.quant.fast_activation import round_indexer, round_kv, round_linear_input


def linear_input(x: Tensor, quant: ActivationQuant) -> Tensor:
    """Input of matrices that the release stores quantised, except `wo_a`."""
    return _StraightThrough.apply(x, round_linear_input) if quant.linear else x


def keys(kv: Tensor, quant: ActivationQuant, *, rotary: int) -> Tensor:
    """Window or compressed keys `[..., K]`, whose last `rotary` dims stay as they are."""
    if not quant.kv:
        return kv
    nope, turned = kv.split((kv.size(-1) - rotary, rotary), -1)
    return torch.cat((_StraightThrough.apply(nope, round_kv), turned), -1)


def indexer_vectors(x: Tensor, form: Literal["none", "fp8", "fp4"]) -> Tensor:
    """Queries or entries of the indexer after their rotation, FP32; no gradient."""
    return round_indexer(wide(x), form=form)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(wide(x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
