"""How far the sampler's log-probabilities are from the actor's."""

import numpy as np
from torch import Tensor

from services.trainer.loss.divergence import kl_k3


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
    p99 = np.quantile(delta.numpy(force=True), 0.99)  # torch's takes no more than 2^24 values
    values = (delta.mean(), p99, delta.max(), kl_k3(sampler, old).mean())
    return dict(zip(names, (float(value) for value in values), strict=True))
