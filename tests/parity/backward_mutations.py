"""Mistakes that no forward pass shows: each leaves the actor's logits right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.models.deepseek_v4 import attention_core, experts, hyper_connections, layers

Plant = Callable[[pytest.MonkeyPatch], None]
Backward = Callable[..., Any]


def _backward_changed(function: Any, make: Callable[[Backward], Backward]) -> Plant:
    return lambda patch: patch.setattr(function, "backward", staticmethod(make(function.backward)))


def _part_changed(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[Backward], Backward]:
    """One of the gradients that a backward pass returns."""

    def make(backward: Backward) -> Backward:
        def wrong(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
            parts = list(backward(ctx, *gradients))
            if parts[index] is not None:
                parts[index] = change(parts[index])
            return tuple(parts)

        return wrong

    return make


def _fewer_rounds(backward: Backward) -> Backward:
    def wrong(ctx: Any, *gradients: Tensor) -> Any:
        ctx.rounds = 1
        return backward(ctx, *gradients)

    return wrong


def _clamp_ignored(backward: Backward) -> Backward:
    def wrong(ctx: Any, *gradients: Tensor) -> Any:
        ctx.limit = 1e9
        return backward(ctx, *gradients)

    return wrong


BACKWARD_MUTATIONS: dict[str, Plant] = {
    "merge sends C, not its transpose, back": _backward_changed(
        hyper_connections._Merge, _part_changed(3, lambda comb: comb.transpose(0, 1))
    ),
    "Sinkhorn back through one round": _backward_changed(
        hyper_connections._Sinkhorn, _fewer_rounds
    ),
    "entries get no gradient": _backward_changed(
        attention_core._Attend, _part_changed(3, torch.zeros_like)
    ),
    "sink gets no gradient": _backward_changed(
        attention_core._Attend, _part_changed(2, torch.zeros_like)
    ),
    "shared clamp ignored backward": _backward_changed(layers.ClampedSwiGLU, _clamp_ignored),
    "routing weights get no gradient": _backward_changed(
        experts._GroupedSwiGLU, _part_changed(3, torch.zeros_like)
    ),
}
