"""Per-token estimates of KL(policy || reference) from tokens that the policy drew.

With d = reference - policy (log-probabilities): k1 = -d, k2 = d²/2, k3 = e^d - 1 - d (J. Schulman,
"Approximating KL divergence", 2020). k1 and k3 have the divergence as their mean; as a loss, k2 has
its gradient when the tokens are the policy's own.
"""

from torch import Tensor

from services.trainer.loss.ratios import bounded_ratio, expm1_continued
from shared.job_algorithm import KlEstimator


def kl_k1(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def kl_k2(policy: Tensor, reference: Tensor) -> Tensor:
    return (reference - policy).square() / 2


def kl_k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Never negative."""
    difference = reference - policy
    return expm1_continued(difference) - difference


def kl_estimate(policy: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """`unbiased` is k3 here; the loss also multiplies it by the ratio (`kl_loss`)."""
    if estimator == "k1":
        return kl_k1(policy, reference)
    if estimator == "k2":
        return kl_k2(policy, reference)
    return kl_k3(policy, reference)


def kl_loss(
    new: Tensor, old: Tensor, reference: Tensor, weights: Tensor, estimator: KlEstimator
) -> Tensor:
    """The per-token KL of the loss, with gradient in `new`.

    `unbiased`: k3 times the token's ratio to the policy that drew it, through which the gradient
    goes, too; value and gradient are then those of the divergence (DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1, whose old policy is the one that samples). That ratio is new / old, whatever ratio
    the policy loss has, and from `old` on to the sampler the `weights` of the correction: what it
    bounds or masks there is bounded or masked here.
    """
    estimate = kl_estimate(new, reference, estimator)
    if estimator == "unbiased":
        return estimate * bounded_ratio(new - old) * weights
    return estimate
