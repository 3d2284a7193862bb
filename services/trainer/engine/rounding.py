"""Weights as the sampler has them, for the time of a pass: quantised and dequantised.

Meanwhile the parameters hold exactly the values that an export publishes, and afterwards their own
again. Gradients go straight through: those of the pass are applied to the unrounded weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from services.trainer.engine.agreement import together
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.models.deepseek_v4.checkpoint import dequantise_tensor, quantise_tensor
from shared.quant.policy import Policy, format_of, scale_name

# What a parameter of this dtype holds without loss.
_EXACT = {torch.float32: ("fp32",), torch.bfloat16: ("bf16", "fp32"), torch.int64: ("int64",)}


@contextmanager
def rounded_weights(model: nn.Module, policy: Policy) -> Iterator[None]:
    """In place, since the optimiser and its buffers hold views of the parameters.

    Forward and backward both belong inside, optimiser steps, exports and checkpoints outside. Costs
    a copy of what is rounded. ValueError, with the weights as they were, for a NaN or an infinity.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with together(), torch.no_grad():
            for name, weight in release_tensors(model):
                if format_of(name, policy) not in _EXACT[weight.dtype]:
                    values = published_values(name, weight, policy)
                    kept.append((weight, weight.clone()))
                    weight.copy_(values)
        yield
    finally:
        with torch.no_grad():
            for weight, master in kept:
                weight.copy_(master)


def published_values(name: str, weight: Tensor, policy: Policy) -> Tensor:
    """FP32 values that a server reads from the export of `weight`."""
    parts = quantise_tensor(name, weight, policy=policy)
    scale = parts.get(scale_name(name)) if name.endswith(".weight") else None
    return dequantise_tensor(name, parts[name], scale=scale)
