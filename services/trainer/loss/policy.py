"""Per-token policy losses. `ratio` is exp(new - old); only `new` has a gradient."""

# N response tokens
import torch
from torch import Tensor

from services.trainer.loss.ratios import bounded_ratio
from services.trainer.loss.segments import mean_of_sample
from shared.job_algorithm import AlgorithmSection


def per_token_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    sample: Tensor,
    used: Tensor,
    algorithm: AlgorithmSection,
) -> tuple[Tensor, Tensor]:
    """The loss of each token `[N]`, and where the ratio is out of its bounds (bool `[N]`)."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.policy_loss == "reinforce":
        return reinforce(new, advantages)
    if algorithm.policy_loss == "clipped_weight":
        return clipped_weight(new, old, advantages, low, high)
    log_ratio = new - old
    if algorithm.policy_loss == "sequence_ratio":
        log_ratio = mean_of_sample(log_ratio, sample, used)
    return clipped_surrogate(log_ratio, advantages, low, high)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's `-min(r·A, clip(r)·A)` and where the bound is what counts, so without gradient.

    With one ratio per token: arXiv 1707.06347, eq. 7; different bounds below and above one are
    DAPO's clip-higher (2503.14476, eq. 10). With a response's geometric mean as the ratio of all
    its tokens, whose losses are then averaged over the response: GSPO (2507.18071, eq. 5 and 7).
    """
    ratio = bounded_ratio(log_ratio)
    free = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).detach()


def clipped_weight(
    new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): `-sg(clip(r))·A·new`; no token is without a
    gradient."""
    ratio = bounded_ratio(new - old).detach()
    clipped = (ratio < low) | (ratio > high)
    return -ratio.clamp(low, high) * advantages * new, clipped


def reinforce(new: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """`-A·new` (Williams 1992), as RLOO has it (arXiv 2402.14740)."""
    return -advantages * new, torch.zeros_like(new, dtype=torch.bool)
