"""Exponentials of differences of log-probabilities that stay numbers, whatever the difference.

A policy that has moved by more than a factor of e^20 has nothing to say about how much further.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp, and beyond ±20 the value there, without gradient."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def expm1_continued(values: Tensor) -> Tensor:
    """e^x - 1, and beyond 20 the tangent there: the gradient keeps its direction."""
    near = values.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(near) + torch.exp(near).detach() * (values - near)
