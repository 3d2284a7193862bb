"""Intervals against tables, slow twins and simulated coverage."""

import math

import numpy as np
import pytest

from shared.statistics import (
    linear_fit,
    mean_interval,
    moving_average,
    paired_difference,
    t_quantile,
)


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227), (95, 1.98525), (1_000_000, 1.95996)],
)
def test_t_quantile_agrees_with_the_table(degrees_of_freedom: int, expected: float) -> None:
    assert t_quantile(0.95, degrees_of_freedom) == pytest.approx(expected, rel=2e-4)


def test_mean_interval_of_known_values() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.18245 * math.sqrt(5 / 3) / 2
    assert interval.mean == 2.5
    assert interval.high - 2.5 == pytest.approx(half, rel=1e-4)
    assert interval.num == 4


def test_mean_interval_of_too_few_values_is_open() -> None:
    assert mean_interval([]).num == 0
    single = mean_interval([0.5])
    assert single.mean == 0.5
    assert math.isnan(single.low)
    assert not single.excludes_zero


def test_paired_difference_ignores_how_hard_problems_are() -> None:
    hardness = np.linspace(0, 1, 50)
    paired = paired_difference(hardness, hardness + 0.1)
    assert paired.mean == pytest.approx(0.1)
    assert paired.high - paired.low < 1e-9
    assert paired.excludes_zero


def test_paired_difference_refuses_different_lengths() -> None:
    with pytest.raises(ValueError, match="3 values before, 2 after"):
        paired_difference([1, 2, 3], [1, 2])


def test_linear_fit_agrees_with_polyfit_and_ignores_gaps() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(40.0)
    y = 0.3 + 0.02 * x + rng.normal(0, 0.1, 40)
    slope, intercept = np.polyfit(x, y, 1)
    y_with_gap = np.append(y, math.nan)
    fit = linear_fit(y_with_gap)
    assert fit.slope == pytest.approx(slope)
    assert fit.intercept == pytest.approx(intercept)
    assert fit.low < fit.slope < fit.high
    assert fit.num == 40


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0]])
def test_linear_fit_of_too_few_points_has_no_interval(values: list[float]) -> None:
    fit = linear_fit(values)
    assert math.isnan(fit.low)
    assert not fit.excludes_zero


def test_linear_fit_covers_a_true_slope_of_zero() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        fit = linear_fit(rng.normal(size=60))
        covered += fit.low <= 0 <= fit.high
    assert covered / 400 >= 0.93


def test_linear_fit_is_wider_when_residuals_follow_each_other() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(size=200)
    for i in range(1, noise.size):
        noise[i] += 0.8 * noise[i - 1]
    shuffled = rng.permutation(noise)
    following, independent = linear_fit(noise), linear_fit(shuffled)
    assert following.high - following.low > 1.2 * (independent.high - independent.low)


def test_moving_average_equals_the_slow_one() -> None:
    values = [1.0, 2.0, math.nan, 4.0, 5.0]
    slow = [np.nanmean(values[max(0, i - 2) : i + 1]) for i in range(5)]
    assert moving_average(values, 3) == pytest.approx(slow)
    assert math.isnan(moving_average([math.nan, 1.0], 2)[0])
