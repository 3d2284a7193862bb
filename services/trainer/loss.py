"""Policy losses and their corrections: pure functions of token arrays.

All log-probabilities are at the sampling temperature: `new` of the actor being trained (only these
have a gradient), `old` of the actor at the start of the step, `sampler` as the rollout recorded.
A step divides by denominators of the whole batch (`token_coefficients`), so that micro-batches and
ranks may be cut anywhere and their losses are simply added.
"""

# N or R response tokens, samples in order, tokens in order
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]
# A log-softmax may round to slightly above zero; more is not a log-probability.
POSITIVE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Clipping:
    """The trusted ratios are [1 - low, 1 + high]."""

    low: float
    high: float


def usable_logprobs(sampler: Tensor) -> Tensor:
    """True where a recorded log-probability is one: not NaN, not infinite, not above zero."""
    return torch.isfinite(sampler) & (sampler <= POSITIVE_TOLERANCE)


def token_coefficients(usable: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """What each token's loss is multiplied by before everything is summed, FP32 `[R]`.

    `usable` bool `[R]`; `lengths` int64 `[samples]` says how the tokens belong to samples.
    token_mean: 1 / usable tokens of the batch (DAPO, arXiv 2503.14476). sequence_mean: 1 / (samples
    with a usable token · usable tokens of the sample) (GRPO, 2402.03300). Unusable tokens get 0.
    """
    weights = usable.float()
    if aggregation == "token_mean":
        return weights / weights.sum().clamp_min(1)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    counts = torch.zeros(len(lengths)).index_add_(0, sample, weights)
    samples = (counts > 0).sum().clamp_min(1)
    return weights / (counts[sample].clamp_min(1) * samples)


def truncated_weights(old: Tensor, sampler: Tensor, cap: float) -> Tensor:
    """TIS: `min(exp(old - sampler), cap)` per token, without gradient; corrects for tokens drawn
    from another distribution than `old` (other kernels, quantised weights, an older version)."""
    return torch.exp((old - sampler).detach()).clamp(max=cap)


def clipped_surrogate(
    new: Tensor, old: Tensor, advantages: Tensor, clipping: Clipping
) -> tuple[Tensor, Tensor]:
    """PPO's per-token loss `-min(r·A, clip(r)·A)`, `r = exp(new - old)`, and where it is clipped.

    Clipped: the bound is what counts, so the token has no gradient (arXiv 1707.06347, eq. 7).
    """
    ratio = torch.exp(new - old)
    free = ratio * advantages
    bounded = ratio.clamp(1 - clipping.low, 1 + clipping.high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).detach()


def kl_k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of `policy`: `e^d - 1 - d` with
    `d = reference - policy`; never negative (Schulman's k3)."""
    difference = reference - policy
    return torch.expm1(difference) - difference


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss of some response tokens depends on besides the actor; FP32 `[N]` each.

    `old` None means that this is the first update of the step: then old is new without gradient.
    """

    old: Tensor | None
    sampler: Tensor
    advantages: Tensor
    coefficients: Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`total` is the sum to be differentiated; the rest is per token, `[N]`, without gradient."""

    total: Tensor
    clipped: Tensor
    weights: Tensor


def policy_loss(
    new: Tensor, batch: TokenBatch, *, clipping: Clipping, tis_cap: float | None
) -> TokenLoss:
    """The GRPO objective over the given tokens: clipped surrogate, weighed by TIS if capped.

    Tokens with coefficient 0 contribute nothing, whatever their sampler log-probability is.
    """
    old = new.detach() if batch.old is None else batch.old
    used = batch.coefficients > 0
    per_token, clipped = clipped_surrogate(new, old, batch.advantages, clipping)
    weights = torch.ones_like(old)
    if tis_cap is not None:
        weights = truncated_weights(old, batch.sampler.where(used, old), tis_cap)
    total = (per_token * weights * batch.coefficients).where(used, 0).sum()
    return TokenLoss(total, clipped & used, weights)


def drift_metrics(old: Tensor, sampler: Tensor, usable: Tensor) -> dict[str, float]:
    """How far the sampler's recorded log-probabilities are from the actor's, over usable tokens.

    `delta_logprob_mean`, `_p99` and `_max` of |old - sampler|; `approx_kl` is k3 of
    KL(sampler || old), because the sampler drew the tokens. All zero without a usable token.
    """
    names = ("delta_logprob_mean", "delta_logprob_p99", "delta_logprob_max", "approx_kl")
    if not bool(usable.any()):
        return dict.fromkeys(names, 0.0)
    old, sampler = old[usable].double(), sampler[usable].double()
    delta = (old - sampler).abs()
    values = (delta.mean(), torch.quantile(delta, 0.99), delta.max(), kl_k3(sampler, old).mean())
    return dict(zip(names, (float(value) for value in values), strict=True))
