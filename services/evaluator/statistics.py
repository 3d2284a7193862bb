"""What a set of graded samples says, and how surely: pass@k, its intervals, and paired changes.

One rule: problems are drawn independently, the samples of one problem are not. Every interval here
resamples or counts problems, except `sampling_interval`, which keeps them fixed and says so.

P problems, n samples each, c of them right, K values of k, B bootstrap replicates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_REPLICATES = 10_000
NORMAL_975 = 1.959963984540054  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval and what it is around."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k samples drawn without replacement from n hold a right one.

    1 - C(n-c, k) / C(n, k), the unbiased estimate of Chen et al., "Evaluating Large Language Models
    Trained on Code" (2021), eq. 1; as a product, because the binomials overflow.
    """
    n, c = num_samples, num_correct
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} samples")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def pass_curve(correct: Sequence[int], num_samples: int) -> Array:
    """[P, n]: pass@k of each problem for k = 1 .. n; `correct` counts right samples per problem."""
    curve_of = {
        c: [pass_at_k(num_samples, c, k) for k in range(1, num_samples + 1)] for c in set(correct)
    }
    return np.array([curve_of[c] for c in correct], np.float64).reshape(len(correct), num_samples)


def share_intervals(values_PK: Array, *, seed: int = 0) -> list[Interval]:
    """Mean of each column of shares in [0, 1] with its interval over problems.

    Where all rows are 0, or all 1, resampling would claim certainty: there the bound is that of
    Clopper and Pearson (1934) for P equal outcomes in P trials.
    """
    return [
        _unless_constant(values_PK[:, k], found)
        for k, found in enumerate(clustered_intervals(values_PK, seed=seed))
    ]


def clustered_intervals(values_PK: Array, *, seed: int = 0) -> list[Interval]:
    """Mean of each column with its percentile bootstrap interval over rows (problems).

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13; rows stay whole, so
    the samples of a problem stay together.
    """
    P = values_PK.shape[0]
    if P == 0:
        return [Interval(math.nan, math.nan, math.nan)] * values_PK.shape[1]
    counts_BP = np.random.default_rng(seed).multinomial(P, np.full(P, 1 / P), size=NUM_REPLICATES)
    low_K, high_K = np.percentile(counts_BP @ values_PK / P, [2.5, 97.5], axis=0)
    columns = zip(values_PK.mean(0).tolist(), low_K.tolist(), high_K.tolist(), strict=True)
    return [Interval(*column) for column in columns]


def sampling_interval(correct: Sequence[int], num_samples: int) -> Interval:
    """pass@1 with the interval that sampling alone leaves, these problems being given.

    Variance of a stratified mean (Cochran, "Sampling Techniques", 1977, section 5.3): one stratum a
    problem, each estimated by p(1 - p) / (n - 1). Problems that were never, or always, solved have
    none by that; what their samples leave open is `_open_share`, and the distances add up as roots
    of squares do (Zou and Donner, Statistics in Medicine 27, 2008). nan below two samples.
    """
    P, share_P = len(correct), np.asarray(correct, np.float64) / num_samples
    mean = float(share_P.mean()) if P else math.nan
    if P == 0 or num_samples < 2:
        return Interval(mean, math.nan, math.nan)
    variance = float((share_P * (1 - share_P)).sum()) / (num_samples - 1) / P**2
    half = NORMAL_975 * math.sqrt(variance)
    below = math.hypot(half, _open_share(int((share_P == 1).sum()), num_samples) / P)
    above = math.hypot(half, _open_share(int((share_P == 0).sum()), num_samples) / P)
    return Interval(mean, max(mean - below, 0.0), min(mean + above, 1.0))


def _open_share(num_problems: int, num_samples: int) -> float:
    """How many of so many problems, none of whose samples was right, may be solved on average.

    The bound of `_all_equal` holds for problems of different chances p: that of no right sample is
    the product of (1 - p)^n, which is largest where all p are equal.
    """
    return num_problems * _all_equal(num_problems * num_samples) if num_problems else 0.0


def _all_equal(trials: int) -> float:
    """How far so many equal outcomes leave a chance from 0 or 1, at 97.5 %: exact (Clopper and
    Pearson, "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial",
    Biometrika 26, 1934)."""
    return float(1.0 - 0.025 ** (1 / trials))


def paired_changes(before_PK: Array, after_PK: Array, *, seed: int = 0) -> list[Interval]:
    """Means of after - before with bootstrap intervals over problems, in the same order in both.

    Problems differ far more than versions do; pairing takes that difference out of the error.
    """
    if before_PK.shape != after_PK.shape:
        raise ValueError(
            f"{len(before_PK)} problems before, {len(after_PK)} after: cannot be paired"
        )
    return clustered_intervals(after_PK - before_PK, seed=seed)


def _unless_constant(values_P: Array, found: Interval) -> Interval:
    if len(values_P) == 0 or values_P.min() != values_P.max() or found.mean not in (0.0, 1.0):
        return found
    bound = _all_equal(len(values_P))
    return Interval(0.0, 0.0, bound) if found.mean == 0.0 else Interval(1.0, 1.0 - bound, 1.0)


def ratio_interval(over_P: Array, under_P: Array, *, seed: int = 0) -> Interval:
    """Sum of `over_P` by sum of `under_P` with its percentile bootstrap interval over problems.

    For shares of samples where problems have different numbers of them. nan where `under_P` is 0;
    where all problems that count agree on 0 or 1, the bound of Clopper and Pearson.
    """
    P, total = len(under_P), float(under_P.sum())
    if total == 0:
        return Interval(math.nan, math.nan, math.nan)
    counts_BP = np.random.default_rng(seed).multinomial(P, np.full(P, 1 / P), size=NUM_REPLICATES)
    sums_B = counts_BP @ under_P
    ratios = (counts_BP @ over_P)[sums_B > 0] / sums_B[sums_B > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    counting_P = under_P > 0
    found = Interval(float(over_P.sum()) / total, float(low), float(high))
    return _unless_constant(over_P[counting_P] / under_P[counting_P], found)
