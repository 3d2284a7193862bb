"""Which tokens count, and by what the sum of their losses is divided.

A step divides by denominators of the whole batch, so that micro-batches and ranks may be cut
anywhere and their losses are simply added. Counts are integers or float64: a batch may have more
tokens than FP32 can count.
"""

# R response tokens, samples in order, tokens in order
import torch
from torch import Tensor

from services.trainer.loss.validity import POSITIVE_TOLERANCE
from shared.job_algorithm import Aggregation


def usable_logprobs(sampler: Tensor) -> Tensor:
    """True where a recorded log-probability is one: not NaN, not infinite, not above zero."""
    return torch.isfinite(sampler) & (sampler <= POSITIVE_TOLERANCE)


def sample_of_token(lengths: Tensor) -> Tensor:
    """int64 `[R]`: the sample that each token belongs to; `lengths` int64 `[samples]`."""
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def token_coefficients(
    usable: Tensor, lengths: Tensor, aggregation: Aggregation, *, max_tokens: int
) -> Tensor:
    """What each token's loss is multiplied by before everything is summed, FP32 `[R]`.

    `usable` bool `[R]`; `lengths` int64 `[samples]` says how the tokens belong to samples.
    token_mean: 1 / usable tokens of the batch (DAPO, arXiv 2503.14476). sequence_mean: 1 / (samples
    with a usable token · usable tokens of the sample) (GRPO, 2402.03300). fixed_length: 1 /
    (samples with a usable token · `max_tokens`) (Dr.GRPO, 2503.20783). Unusable tokens get 0.
    """
    if aggregation == "token_mean":
        return usable.float() / usable.sum().clamp_min(1)
    sample = sample_of_token(lengths)
    counts = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, sample, usable.long())
    samples = (counts > 0).sum().clamp_min(1)
    if aggregation == "fixed_length":
        return usable.float() / (samples * max_tokens)
    return usable.float() / (counts[sample].clamp_min(1) * samples)
