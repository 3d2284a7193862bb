"""Sums and means over the tokens of each sample, given back to every one of its tokens."""

import torch
from torch import Tensor


def sum_of_sample(values: Tensor, sample: Tensor) -> Tensor:
    """`[N]`: for each token the sum of `values` over its sample; `sample` int64 `[N]`."""
    if not len(values):
        return values
    totals = torch.zeros(int(sample.max()) + 1, dtype=values.dtype, device=values.device)
    return totals.index_add(0, sample, values)[sample]


def mean_of_sample(values: Tensor, sample: Tensor, counted: Tensor) -> Tensor:
    """`[N]`: for each token the mean over the counted tokens of its sample; 0 without any."""
    kept = values.where(counted, 0)
    counts = sum_of_sample(counted.to(values.dtype), sample)
    return sum_of_sample(kept, sample) / counts.clamp_min(1)
