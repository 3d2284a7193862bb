import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.parity.scores import Bounds, ScoredSequence, compare, violations


def scored(ours: list[float], theirs: list[float], *, first: int = 2) -> ScoredSequence:
    tokens = tuple(range(100, 100 + first + len(ours)))
    return ScoredSequence(tokens, first, np.array(ours), np.array(theirs))


def test_statistics_by_hand() -> None:
    found = compare([scored([-1.0, -2.0], [-1.5, -1.9]), scored([-0.5], [-0.5], first=1)])
    deltas = [0.5, -0.1, 0.0]
    assert (found.num_sequences, found.num_tokens, found.num_not_finite) == (2, 3, 0)
    assert found.mean == pytest.approx(0.2)
    assert found.p50 == pytest.approx(0.1)
    assert found.max == pytest.approx(0.5)
    assert found.k1 == pytest.approx(sum(deltas) / 3)
    assert found.k3 == pytest.approx(sum(math.exp(-d) - 1 + d for d in deltas) / 3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=80))
def test_slow_twin(pairs: list[tuple[float, float]]) -> None:
    found = compare([scored([a for a, _ in pairs], [b for _, b in pairs])])
    sizes = sorted(abs(a - b) for a, b in pairs)
    assert found.mean == pytest.approx(sum(sizes) / len(sizes), abs=1e-12)
    assert found.max == sizes[-1]
    rank = 0.99 * (len(sizes) - 1)
    low, high = sizes[math.floor(rank)], sizes[math.ceil(rank)]
    assert found.p99 == pytest.approx(low + (high - low) * (rank - math.floor(rank)), abs=1e-12)
    assert found.k3 >= -1e-12
    assert sum(found.histogram.counts) == len(pairs)
    assert sum(part.num for part in found.by_position) == len(pairs)
    sizes_of_worst = [abs(token.delta) for token in found.worst]
    assert sizes_of_worst == pytest.approx(sizes[::-1][:10])


def test_k_estimators_are_near_the_divergence_of_what_was_sampled() -> None:
    rng = np.random.default_rng(0)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])
    drawn = rng.choice(3, size=200_000, p=p)
    found = compare([scored(list(np.log(p[drawn])), list(np.log(q[drawn])))])
    divergence = float((p * np.log(p / q)).sum())
    assert found.k1 == pytest.approx(divergence, rel=0.1)
    assert found.k3 == pytest.approx(divergence, rel=0.1)


def test_worst_tokens_come_with_their_neighbours() -> None:
    ours = [-1.0] * 30
    theirs = list(ours)
    theirs[12] = -4.0
    worst = compare([scored(ours, theirs, first=3)], num_worst=1).worst[0]
    assert (worst.position, worst.token_id, worst.delta) == (15, 115, 3.0)
    assert worst.before == tuple(range(107, 115))
    assert worst.after == tuple(range(116, 124))


def test_what_is_not_finite_is_counted_named_and_fails() -> None:
    found = compare([scored([-1.0, math.nan, -math.inf], [-1.0, -1.0, -1.0])])
    assert found.num_not_finite == 2
    assert found.mean == 0
    assert found.worst[0].position == 3
    assert violations(found, Bounds(mean=None)) == ["2 of 3 log p are not finite"]
    nothing = compare([scored([math.nan], [-1.0])])
    assert math.isnan(nothing.mean)
    assert "mean |Δ log p| nan exceeds 0.04" in violations(nothing, Bounds())


def test_each_bound_is_named_with_its_value() -> None:
    found = compare([scored([-1.0, -1.0], [-1.0, -1.5])])
    assert violations(found, Bounds(mean=0.25, p99=0.5, max=0.5, k3=1.0)) == []
    assert violations(found, Bounds(mean=0.04, max=0.1)) == [
        "mean |Δ log p| 0.25 exceeds 0.04",
        "largest |Δ log p| 0.5 exceeds 0.1",
    ]


def test_equal_sides_have_nothing_to_show() -> None:
    found = compare([scored([-1.0] * 5, [-1.0] * 5)])
    assert (found.mean, found.max, found.k1, found.k3) == (0, 0, 0, 0)
    assert found.histogram.counts[0] == 5
    assert violations(found, Bounds(mean=0, max=0, k3=0)) == []


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="theirs: 1 values for 2 tokens"):
        ScoredSequence((1, 2, 3), 1, np.zeros(2), np.zeros(1))
    with pytest.raises(ValueError, match="first 3 of 3 tokens compares none"):
        ScoredSequence((1, 2, 3), 3, np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match="no sequences"):
        compare([])


def test_positions_are_binned_without_gaps() -> None:
    found = compare([scored([-1.0] * 100, [-2.0] * 50 + [-1.0] * 50, first=5)])
    bins = found.by_position
    assert (bins[0].start, bins[-1].stop) == (5, 105)
    assert all(a.stop == b.start for a, b in pairwise(bins))
    assert bins[0].mean == 1
    assert bins[-1].max == 0
