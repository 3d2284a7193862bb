"""Weights as the sampler has them, for the time of a pass: quantised and dequantised.

Meanwhile the parameters hold exactly the values that an export publishes, and afterwards their own
again. Gradients go straight through: those of the pass are applied to the unrounded weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from services.trainer.engine.agreement import together
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.models.deepseek_v4.checkpoint import dequantise_tensor, quantise_tensor
from shared.quant.policy import Policy, format_of, scale_name

# What a parameter of this dtype holds without loss.
_EXACT = {torch.float32: ("fp32",), torch.bfloat16: ("bf16", "fp32"), torch.int64: ("int64",)}


_BATCH = 2**25  # values that are rounded at once; large matrices have as many


@contextmanager
def rounded_weights(model: nn.Module, policy: Policy) -> Iterator[None]:
    """In place, since the optimiser and its buffers hold views of the parameters.

    Forward and backward both belong inside, optimiser steps, exports and checkpoints outside. Costs
    a copy of what is rounded. ValueError, with the weights as they were, for a NaN or an infinity.
    """
    kept: list[tuple[list[Tensor], Tensor]] = []
    try:
        with together(), torch.no_grad():
            for names, weights in _batches(model, policy):
                masters = torch.stack(weights)
                values = _stacked_values(names, masters, policy)
                kept.append((weights, masters))
                torch._foreach_copy_(weights, list(values.to(masters.dtype).unbind()))
        yield
    finally:
        with torch.no_grad():
            for weights, masters in kept:
                torch._foreach_copy_(weights, list(masters.unbind()))


def published_values(name: str, weight: Tensor, policy: Policy) -> Tensor:
    """FP32 values that a server reads from the export of `weight`, or of each in a stack."""
    parts = quantise_tensor(name, weight, policy=policy)
    scale = parts.get(scale_name(name)) if name.endswith(".weight") else None
    return dequantise_tensor(name, parts[name], scale=scale)


def _batches(model: nn.Module, policy: Policy) -> Iterator[tuple[list[str], list[Tensor]]]:
    """Neighbours that are rounded alike, as all experts of a layer are: together they take as many
    launches as one of them would."""
    rounded = (
        (name, weight)
        for name, weight in release_tensors(model)
        if format_of(name, policy) not in _EXACT[weight.dtype]
    )
    for _, found in groupby(
        rounded, lambda one: (format_of(one[0], policy), one[1].dtype, one[1].shape)
    ):
        alike = list(found)
        size = max(1, _BATCH // max(1, alike[0][1].numel()))
        for start in range(0, len(alike), size):
            names, weights = zip(*alike[start : start + size], strict=True)
            yield list(names), list(weights)


def _stacked_values(names: Sequence[str], masters: Tensor, policy: Policy) -> Tensor:
    """`published_values` of a stack; what is wrong with one of it is said by its name."""
    try:
        return published_values(names[0], masters, policy)
    except ValueError:
        for name, weight in zip(names, masters, strict=True):
            published_values(name, weight, policy)
        raise
