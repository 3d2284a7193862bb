"""Where the actor rounds activations as its sampler does; gradients go straight through.

Rounded values fit BF16, whose mantissa is longer, so activations keep their dtype.
"""

from typing import Literal

import torch
from torch import Tensor

from services.trainer.models.deepseek_v4.layers import wide
from shared.quant.activation import (
    ActivationQuant,
    quantise_indexer,
    quantise_kv,
    quantise_linear_input,
)


def linear_input(x: Tensor, quant: ActivationQuant) -> Tensor:
    """Input of matrices that the release stores quantised, except `wo_a`."""
    return quantise_linear_input(wide(x)).to(x.dtype) if quant.linear else x


def keys(kv: Tensor, quant: ActivationQuant, *, rotary: int) -> Tensor:
    """Window or compressed keys `[..., K]`, whose last `rotary` dims stay as they are."""
    if not quant.kv:
        return kv
    nope, turned = kv.split((kv.size(-1) - rotary, rotary), -1)
    return torch.cat((quantise_kv(wide(nope)).to(kv.dtype), turned), -1)


def indexer_vectors(x: Tensor, form: Literal["none", "fp8", "fp4"]) -> Tensor:
    """Queries or entries of the indexer after their rotation, FP32."""
    return quantise_indexer(wide(x), form=form)
