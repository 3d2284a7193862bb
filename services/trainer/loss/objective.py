"""The loss of a step: a policy loss, weighed for the sampler's drift, with KL and entropy terms.

Pure functions of token arrays. All log-probabilities are at the sampling temperature: `new` of the
actor being trained (only these have a gradient), `old` of the actor at the start of the step,
`sampler` as the rollout recorded, `reference` of the frozen reference policy.
"""

# N response tokens of whole samples
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.loss.corrections import at_bound, kept_by_veto, sampler_weights
from services.trainer.loss.divergence import kl_loss
from services.trainer.loss.policy import per_token_loss
from shared.job_algorithm import AlgorithmSection


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss of some tokens depends on besides the actor; FP32 `[N]` unless said otherwise.

    `old` None means that this is the first update of the step: then old is new without gradient.
    `sample` says which tokens belong together; a sample's tokens are here all or not at all.
    """

    old: Tensor | None
    sampler: Tensor
    advantages: Tensor
    coefficients: Tensor
    sample: Tensor  # int64
    reference: Tensor | None = None

    def at(self, places: Tensor, device: torch.device | str) -> "TokenBatch":
        """The tokens of a micro-batch."""

        def pick(values: Tensor) -> Tensor:
            return values[places].to(device)

        return TokenBatch(
            None if self.old is None else pick(self.old),
            pick(self.sampler),
            pick(self.advantages),
            pick(self.coefficients),
            pick(self.sample),
            None if self.reference is None else pick(self.reference),
        )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`total` is the sum to be differentiated; the rest is per token, `[N]`, without gradient."""

    total: Tensor
    clipped: Tensor
    weights: Tensor
    corrected: Tensor  # bool: the weight is at a bound or masked


def policy_loss(
    new: Tensor, entropy: Tensor, batch: TokenBatch, algorithm: AlgorithmSection
) -> TokenLoss:
    """Sum over tokens of coefficient · (weight · policy loss + β · KL - bonus · entropy).

    Tokens with coefficient 0 contribute nothing, whatever their other values are, and neither do
    those of vetoed responses.
    """
    used = batch.coefficients > 0
    # What does not count becomes harmless before any exponential sees it.
    sampler = batch.sampler.where(used, new.detach())
    old = sampler if algorithm.proximal == "sampler" else new.detach()
    if batch.old is not None and algorithm.proximal == "actor":
        old = batch.old
    _, sample = torch.unique(batch.sample, return_inverse=True)  # few, whatever the batch's size
    per_token, clipped = per_token_loss(new, old, batch.advantages, sample, used, algorithm)
    weights = sampler_weights(old, sampler, sample, used, algorithm.correction)
    loss = per_token * weights
    if algorithm.kl_in_loss:
        assert batch.reference is not None, "a KL in the loss needs a reference"
        kl = kl_loss(new, old, batch.reference, weights, algorithm.kl.estimator)
        loss = loss + algorithm.kl.coefficient * kl
    if algorithm.entropy_bonus:
        loss = loss - algorithm.entropy_bonus * entropy
    kept = kept_by_veto(old, sampler, sample, used, algorithm.correction.veto)
    total = (loss * batch.coefficients).where(kept, 0).sum()
    corrected = at_bound(weights, algorithm.correction) & used
    return TokenLoss(total, clipped & used, weights, corrected)
