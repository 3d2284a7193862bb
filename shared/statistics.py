"""Means, paired differences, straight lines with 95 % intervals, and the test of changes.

One rule: an interval counts independent things. For an evaluation these are problems, not samples;
for a curve over steps, neighbouring residuals are not independent and the error is widened for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Numbers = Sequence[float] | NDArray[np.float64]

NUM_SIGNS = 4_000
LEVEL = 0.025
"""Of `sign_flip_p`, for a change or a trend to be called one. Half of the usual 5 %: a series of
200 comparisons of one version with itself then stays at or below 5 % false alarms in 98 of 100
series, where a level of 5 % would exceed it in 4 of 10."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval; `low` and `high` are nan below two values."""

    mean: float
    low: float
    high: float
    num: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Least squares line; `low` and `high` bound the slope and are nan below three points."""

    slope: float
    low: float
    high: float
    intercept: float
    num: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def mean_interval(values: _Numbers, *, confidence: float = 0.95) -> Interval:
    """Student t interval of the mean of independent values (one per problem)."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(sample.mean())
    if sample.size == 1:
        return Interval(mean, math.nan, math.nan, 1)
    error = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    half = t_quantile(confidence, sample.size - 1) * error
    return Interval(mean, mean - half, mean + half, sample.size)


def paired_difference(before: _Numbers, after: _Numbers, *, confidence: float = 0.95) -> Interval:
    """Mean of after - before over the same problems in the same order, with its t interval."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} values before, {len(after)} after: not the same problems")
    return mean_interval(np.subtract(after, before, dtype=np.float64), confidence=confidence)


def sign_flip_p(differences_P: _Numbers, *, seed: int = 0) -> float:
    """Two-sided p-value of "no problem has changed": its differences may as well be turned round.

    Fisher's randomisation test for pairs ("The Design of Experiments", 1935, section 21) over
    `NUM_SIGNS` random choices of signs, the observed one counted with them. Equal versions
    make each difference symmetric about 0 whatever the problem, so the level holds for few problems
    and for skewed ones, where the bootstrap's does not.
    """
    moved_P = np.asarray(differences_P, np.float64)
    moved_P = moved_P[moved_P != 0]
    if moved_P.size == 0:
        return 1.0
    shape = (NUM_SIGNS, moved_P.size)
    signs_BP = np.random.default_rng(seed).integers(0, 2, size=shape, dtype=np.int8) * 2.0 - 1.0
    observed = abs(float(moved_P.sum())) - 1e-9
    num_extreme = int((np.abs(signs_BP @ moved_P) >= observed).sum())
    return (1 + num_extreme) / (1 + NUM_SIGNS)


def linear_fit(y: _Numbers, x: _Numbers | None = None, *, confidence: float = 0.95) -> LinearFit:
    """Least squares over finite points; x defaults to 0, 1, 2, ...

    The slope's standard error is the larger of the ordinary one and Newey and West's (1987,
    eq. 5), whose Bartlett window of floor(4 (n/100)^(2/9)) lags allows for residuals that follow
    each other, as the rewards of consecutive steps do.
    """
    y_N = np.asarray(y, dtype=np.float64)
    x_N = np.arange(y_N.size, dtype=np.float64) if x is None else np.asarray(x, dtype=np.float64)
    if x_N.size != y_N.size:
        raise ValueError(f"{x_N.size} x values, {y_N.size} y values")
    finite_N = np.isfinite(x_N) & np.isfinite(y_N)
    x_N, y_N = x_N[finite_N], y_N[finite_N]
    num = int(x_N.size)
    if num < 2 or np.ptp(x_N) == 0:
        mean = float(y_N.mean()) if num else math.nan
        return LinearFit(math.nan, math.nan, math.nan, mean, num)
    centred_N = x_N - x_N.mean()
    spread = float(centred_N @ centred_N)
    slope = float(centred_N @ y_N) / spread
    intercept = float(y_N.mean() - slope * x_N.mean())
    if num < 3:
        return LinearFit(slope, math.nan, math.nan, intercept, num)
    residual_N = y_N - intercept - slope * x_N
    half = t_quantile(confidence, num - 2) * _slope_error(centred_N, residual_N) / spread
    return LinearFit(slope, slope - half, slope + half, intercept, num)


def t_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """The t with P(|T| <= t) = confidence, to about six digits.

    With t = sqrt(v) tan(a) the density becomes cos(a)^(v - 1) on [0, pi/2): smooth and bounded, so
    a trapezoid sum inverts it.
    """
    if not 0 < confidence < 1 or degrees_of_freedom < 1:
        raise ValueError(f"confidence {confidence}, degrees of freedom {degrees_of_freedom}")
    v = min(degrees_of_freedom, 10_000)
    angle = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (v - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(v) * math.tan(float(np.interp(confidence * mass[-1], mass, angle)))


def shown_ks(num_samples: int) -> list[int]:
    """The k of pass@k that tables and figures show: 1, 2, 4, ... up to n, and n itself."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def moving_average(values: _Numbers, window: int) -> NDArray[np.float64]:
    """Mean of the last `window` values at each place (fewer at the start); nan values are skipped.

    Where no finite value is in reach the result is nan.
    """
    sample = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(sample)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, sample, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    end = np.arange(1, sample.size + 1)
    start = np.maximum(0, end - window)
    num = count[end] - count[start]
    return np.where(num > 0, (total[end] - total[start]) / np.maximum(num, 1), math.nan)


def _slope_error(centred_N: NDArray[np.float64], residual_N: NDArray[np.float64]) -> float:
    """Standard error of the slope times the spread of x."""
    num = residual_N.size
    variance = float(residual_N @ residual_N) / (num - 2)
    ordinary = variance * float(centred_N @ centred_N)
    score_N = centred_N * residual_N
    robust = float(score_N @ score_N)
    lags = min(int(4 * (num / 100) ** (2 / 9)), num - 1)
    for lag in range(1, lags + 1):
        weight = 1 - lag / (lags + 1)
        robust += 2 * weight * float(score_N[lag:] @ score_N[:-lag])
    return math.sqrt(max(ordinary, robust * num / (num - 2)))
