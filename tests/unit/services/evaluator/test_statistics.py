"""The evaluator's statistics against slow, obvious twins."""

import itertools
import math

import numpy as np
import pytest

from services.evaluator.statistics import (
    clustered_intervals,
    paired_changes,
    pass_at_k,
    pass_curve,
    sampling_interval,
    share_intervals,
)
from shared.statistics import mean_interval


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_counts_subsets_that_hold_a_right_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        right = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)


def test_pass_at_k_is_unbiased() -> None:
    """Averaged over the binomial draws of n samples it is 1 - (1 - p)^k exactly."""
    n, p = 8, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_of_thousands_of_samples_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(8, 9, 1), (8, -1, 1), (8, 4, 0), (8, 4, 9)])
def test_pass_at_k_refuses_what_it_does_not_mean(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


def test_pass_curve_has_a_row_per_problem_and_a_column_per_k() -> None:
    curve = pass_curve([0, 3, 8], 8)
    assert curve.shape == (3, 8)
    assert curve[1].tolist() == [pass_at_k(8, 3, k) for k in range(1, 9)]
    assert (np.diff(curve, axis=1) >= 0).all()


def test_bootstrap_agrees_with_the_closed_form_over_problems() -> None:
    correct = np.random.default_rng(1).binomial(8, 0.4, size=128)
    shares = correct / 8
    (found,) = clustered_intervals(shares[:, None])
    closed = mean_interval(shares)
    assert found.mean == pytest.approx(closed.mean)
    width = closed.high - closed.low
    assert found.low == pytest.approx(closed.low, abs=0.05 * width)
    assert found.high == pytest.approx(closed.high, abs=0.05 * width)


def test_bootstrap_agrees_with_resampling_in_a_loop() -> None:
    values = np.random.default_rng(2).random(20)
    rng = np.random.default_rng(3)
    means = [values[rng.integers(0, 20, 20)].mean() for _ in range(10_000)]
    low, high = np.percentile(means, [2.5, 97.5])
    (found,) = clustered_intervals(values[:, None])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def test_samples_of_one_problem_do_not_count_as_independent() -> None:
    """Eight equal samples of each problem tell no more than one."""
    once = pass_curve([0, 1] * 20, 1)[:, :1]
    eight = pass_curve([0, 8] * 20, 8)[:, :1]
    assert clustered_intervals(once) == clustered_intervals(eight)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(200):
        difficulty = rng.beta(2, 3, size=64)
        shares = rng.binomial(8, difficulty) / 8
        found = mean_interval(shares)
        hits += found.low <= 0.4 <= found.high
    assert 180 <= hits <= 200


def test_interval_is_the_same_each_time() -> None:
    values = np.random.default_rng(5).random((30, 4))
    assert clustered_intervals(values) == clustered_intervals(values)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_outcomes_do_not_claim_certainty(value: float) -> None:
    (found,) = share_intervals(np.full((30, 1), value))
    assert found.mean == value
    assert found.high - found.low == pytest.approx(1 - 0.025 ** (1 / 30))
    assert found.low <= value <= found.high


def test_no_problems_give_no_interval() -> None:
    (found,) = share_intervals(np.empty((0, 1)))
    assert math.isnan(found.mean)


def test_sampling_interval_is_that_of_repeated_sampling() -> None:
    rng = np.random.default_rng(6)
    difficulty = np.array([0.1, 0.5, 0.9] * 20)
    n = 16
    spread = np.std([(rng.binomial(n, difficulty) / n).mean() for _ in range(4000)])
    halves = []
    for _ in range(200):
        found = sampling_interval(rng.binomial(n, difficulty).tolist(), n)
        halves.append((found.high - found.low) / 2)
    assert np.mean(halves) == pytest.approx(1.96 * spread, rel=0.05)


@pytest.mark.parametrize("num_right", [0, 8])
def test_sampling_interval_at_the_edge_is_that_of_clopper_and_pearson(num_right: int) -> None:
    """None of 240 samples right leaves 1.5 % open: 0.985^240 is 0.025."""
    found = sampling_interval([num_right] * 30, 8)
    width = found.high - found.low
    assert found.mean == num_right / 8
    assert found.low <= found.mean <= found.high
    assert (1 - width) ** 240 == pytest.approx(0.025)


@pytest.mark.parametrize(
    "chances", [[0.001] * 30, [0.02] * 30, [0.0] * 29 + [0.3], [0.99] * 30, [0.0, 0.05, 1.0] * 10]
)
def test_sampling_interval_covers_the_truth_near_the_edges(chances: list[float]) -> None:
    rng = np.random.default_rng(17)
    drawn = [rng.binomial(8, chances).tolist() for _ in range(400)]
    found = [sampling_interval(one, 8) for one in drawn]
    truth = float(np.mean(chances))
    assert np.mean([one.low <= truth <= one.high for one in found]) >= 0.95


def test_sampling_interval_of_single_samples_is_unknown() -> None:
    assert math.isnan(sampling_interval([0, 1, 1], 1).low)


def test_paired_changes_find_what_unpaired_intervals_hide() -> None:
    rng = np.random.default_rng(7)
    before = rng.random(60) * 0.8
    after = before + 0.05 + 0.01 * rng.standard_normal(60)
    (change,) = paired_changes(before[:, None], after[:, None])
    assert change.excludes_zero
    assert change.mean == pytest.approx(0.05, abs=0.01)
    (one,), (two,) = clustered_intervals(before[:, None]), clustered_intervals(after[:, None])
    assert one.high > two.low


def test_paired_changes_of_one_and_the_same_are_nothing() -> None:
    values = np.random.default_rng(8).random(40)
    (change,) = paired_changes(values[:, None], values[:, None])
    assert (change.mean, change.low, change.high) == (0.0, 0.0, 0.0)
    assert not change.excludes_zero


def test_paired_changes_refuse_other_problems() -> None:
    with pytest.raises(ValueError, match="3 problems before, 4 after"):
        paired_changes(np.zeros(3), np.zeros(4))
