"""Weights of tokens that were drawn with other probabilities than the actor's.

The ratio is exp(old - sampler): other kernels, quantised weights or an older version drew the token
than the actor at the start of the step. Weights have no gradient and leave denominators as they
are: a token of weight 0 adds nothing, and the mean is still over all.
"""

# N response tokens of whole samples
import math

import torch
from torch import Tensor

from services.trainer.loss.ratios import bounded_ratio
from services.trainer.loss.segments import mean_of_sample, sum_of_sample
from shared.job_algorithm import CorrectionSection


def sampler_weights(
    old: Tensor, sampler: Tensor, sample: Tensor, used: Tensor, correction: CorrectionSection
) -> Tensor:
    """`[N]`, 0 where not used.

    tis: truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025), here also with a lower bound. mis: masked importance sampling
    (Liu et al., "When speed kills stability", 2025). icepop: both bounds, per token (Ring-1T, arXiv
    2510.18855). reject: the mask without the ratio.
    """
    log_ratio = (old - sampler).detach().where(used, 0)
    if correction.kind == "none":
        return used.to(log_ratio.dtype)
    ratio = bounded_ratio(_at_level(log_ratio, sample, used, correction.level))
    inside = (ratio >= correction.low) & (ratio <= correction.high)
    if correction.kind == "tis":
        weights = ratio.clamp(correction.low, correction.high)
    elif correction.kind == "reject":
        weights = inside.to(ratio.dtype)
    else:
        weights = ratio.where(inside, 0)
    return weights.where(kept_by_veto(old, sampler, sample, used, correction.veto), 0)


def kept_by_veto(
    old: Tensor, sampler: Tensor, sample: Tensor, used: Tensor, veto: float | None
) -> Tensor:
    """bool `[N]`: the used tokens of responses that are not vetoed."""
    if veto is None:
        return used
    log_ratio = (old - sampler).detach().where(used, 0)
    extreme = (log_ratio < math.log(veto)).to(log_ratio.dtype)
    return used & (sum_of_sample(extreme, sample) == 0)


def at_bound(weights: Tensor, correction: CorrectionSection) -> Tensor:
    """bool `[N]`: where a used token's weight is no longer its ratio."""
    if correction.kind == "none":
        return torch.zeros_like(weights, dtype=torch.bool)
    if correction.kind == "tis":
        return (weights >= correction.high) | (weights <= correction.low)
    return weights == 0


def _at_level(log_ratio: Tensor, sample: Tensor, used: Tensor, level: str) -> Tensor:
    if level == "sequence":
        return sum_of_sample(log_ratio, sample)
    if level == "geometric":
        return mean_of_sample(log_ratio, sample, used)
    return log_ratio
