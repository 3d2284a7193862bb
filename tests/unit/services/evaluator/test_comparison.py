"""Comparisons of evaluations: how often they cry wolf, and what they call coverage."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evaluation_alarms import KINDS
from services.evaluator import statistics
from services.evaluator.comparison import NotComparable, compare
from services.evaluator.pages import _call
from services.evaluator.samples import GradedSample, Header, ProblemResult
from services.evaluator.statistics import ratio_interval
from services.evaluator.trend import describe_trend, trend
from shared.messages import Score
from shared.statistics import LEVEL, NUM_SIGNS, shown_ks, sign_flip_p

N = 8
REAL = Path("tests/fixtures/evals/tiny_arithmetic.json")


def evaluation(
    correct: Sequence[int], *, num: int = N, first: int = 0, eval_id: str = "a"
) -> tuple[Header, list[ProblemResult]]:
    results = [_problem(first + row, count, num) for row, count in enumerate(correct)]
    rows = [one.row for one in results]
    header = Header(
        eval_id=eval_id, suite="s", policy_version=0, samples_per_problem=num, seed=0, rows=rows
    )
    return header, results


def _problem(row: int, num_correct: int, num: int) -> ProblemResult:
    samples = [
        GradedSample(
            text="",
            token_ids=[1],
            finish_reason="stop",
            outcome=Score(value=float(i < num_correct)),
        )
        for i in range(num)
    ]
    return ProblemResult(
        row=row, source="", prompt=f"p{row}", gold="1", policy_version=0, samples=samples
    )


def test_sign_flips_agree_with_all_choices_of_signs() -> None:
    differences = np.array([0.5, -0.125, 0.25, 0.375, 0.125, 0.25, -0.25, 0.5])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1).T
    exact = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.02)
    assert sign_flip_p(np.zeros(5)) == 1.0
    assert sign_flip_p(np.ones(30)) == pytest.approx(1 / (1 + NUM_SIGNS))


@pytest.fixture
def few_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals decide nothing, and take most of the time."""
    monkeypatch.setattr(statistics, "NUM_REPLICATES", 10)


def count_alarms(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], num: int) -> list[int]:
    """How often pass@k "changed", for each k, and how often there was a verdict, as pages tell."""
    found = [compare(evaluation(one, num=num), evaluation(two, num=num)) for one, two in pairs]
    changed = sum("changed" in str(_call(one.changes[1])[-1]) for one in found)
    by_k = [sum(one.changes[k].is_significant for one in found) for k in found[0].changes]
    assert changed == by_k[0]
    return [*by_k, *(sum(one.verdict == v for one in found) for v in ("coverage", "sharpening"))]


@pytest.mark.usefixtures("few_replicates")
@pytest.mark.parametrize("difficulty", KINDS)
def test_two_evaluations_of_one_version_rarely_differ(difficulty: str) -> None:
    """At most 5 % of 200 pairs, whatever the problems are like: pass@1 to pass@8, verdicts."""
    rng = np.random.default_rng(11)
    drawn = [KINDS[difficulty](rng) for _ in range(200)]
    alarms = count_alarms(((rng.binomial(N, p), rng.binomial(N, p)) for p in drawn), N)
    assert max(alarms) <= 10


@pytest.mark.usefixtures("few_replicates")
def test_halves_of_real_samples_rarely_differ() -> None:
    """The tiny policy's own samples, dealt into two halves 200 times."""
    right_PN = np.array(json.loads(REAL.read_text())["right"])
    rng = np.random.default_rng(12)
    half = right_PN.shape[1] // 2
    dealt = [rng.permuted(right_PN, axis=1) for _ in range(200)]
    pairs = ((one[:, :half].sum(1), one[:, half : 2 * half].sum(1)) for one in dealt)
    assert max(count_alarms(pairs, half)) <= 10
    assert 0.1 < right_PN.mean() < 0.9  # problems on which versions could differ


def test_a_real_change_is_found() -> None:
    rng = np.random.default_rng(13)
    p = rng.beta(2, 3, 60)
    before, after = rng.binomial(N, p), rng.binomial(N, np.minimum(p + 0.1, 1))
    found = compare(evaluation(before), evaluation(after))
    assert found.changes[1].is_significant
    assert found.changes[1].difference.low > 0


def test_newly_solved_problems_are_coverage() -> None:
    before, after = [0] * 20 + [4] * 20, [3] * 20 + [4] * 20
    found = compare(evaluation(before), evaluation(after))
    assert found.verdict == "coverage"
    assert [pair.after.row for pair in found.gained] == list(range(20))
    assert found.lost == []


def test_surer_answers_to_solved_problems_are_sharpening() -> None:
    before, after = [0] * 20 + [3] * 20, [0] * 20 + [7] * 20
    found = compare(evaluation(before), evaluation(after))
    assert found.verdict == "sharpening"
    assert found.changes[8].difference.mean == 0.0


def test_noise_is_undecided_and_so_are_too_few_samples() -> None:
    rng = np.random.default_rng(14)
    counts = rng.binomial(N, 0.5, 40)
    assert compare(evaluation(counts), evaluation(counts[::-1])).verdict == "undecided"
    few = compare(evaluation([0] * 30, num=4), evaluation([4] * 30, num=4))
    assert (few.verdict, sorted(few.changes)) == ("undecided", [1, 2, 4])


def test_only_common_problems_are_paired() -> None:
    found = compare(evaluation([8] * 10), evaluation([0] * 10, first=4))
    assert (len(found.pairs), found.num_only_before, found.num_only_after) == (6, 4, 4)
    assert len(found.lost) == 6
    with pytest.raises(NotComparable, match="no problem in common"):
        compare(evaluation([1] * 3), evaluation([1] * 3, first=50))


def test_shown_ks_are_powers_of_two_and_all_samples() -> None:
    assert [shown_ks(num) for num in (8, 6, 1)] == [[1, 2, 4, 8], [1, 2, 4, 6], [1]]
    assert list(compare(evaluation([1] * 3, num=6), evaluation([2] * 3, num=6)).changes) == [
        1, 2, 4, 6
    ]  # fmt: skip


def test_ratio_of_unequal_problems_has_an_interval_over_problems() -> None:
    over, under = np.array([8.0, 0, 2, 5] * 10), np.array([8.0, 8, 4, 5] * 10)
    found = ratio_interval(over, under)
    assert found.mean == pytest.approx(15 / 25)
    assert found.low < found.mean < found.high
    assert np.isnan(ratio_interval(over, np.zeros(40)).mean)
    few = ratio_interval(np.zeros(40), np.array([1.0] * 5 + [0.0] * 35))
    assert (few.mean, few.low) == (0.0, 0.0)
    assert few.high == pytest.approx(1 - 0.025 ** (1 / 5))


def test_trend_is_the_slope_of_the_means_and_its_interval_covers_the_truth() -> None:
    steps, hits = [0, 10, 20, 30], 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        p = rng.uniform(0.2, 0.5, 60)
        rising = np.array([rng.binomial(N, p + 0.004 * step) / N for step in steps])
        found = trend(steps, rising)
        assert found is not None
        assert found.slope.mean == pytest.approx(np.polyfit(steps, rising.mean(1), 1)[0])
        hits += found.slope.low <= 0.004 <= found.slope.high
    assert 35 <= hits <= 40


def test_trends_are_told_in_a_sentence() -> None:
    rng = np.random.default_rng(15)
    p = rng.uniform(0.2, 0.5, 80)
    rising = np.array([rng.binomial(N, p + 0.1 * step) / N for step in range(4)])
    assert describe_trend(trend(range(4), rising)).startswith("rising: pass@1 +")
    falling = describe_trend(trend(range(4), rising[::-1]))
    assert falling.startswith("falling: pass@1 -")
    level = np.array([rng.binomial(N, p) / N for _ in range(4)])
    assert describe_trend(trend(range(4), level)).startswith("no trend is shown")
    assert trend([5], rising[:1]) is None
    assert "two evaluations" in describe_trend(None)


def test_trends_of_an_unchanging_policy_are_rarely_found() -> None:
    rng, alarms = np.random.default_rng(16), 0
    for _ in range(200):
        p = rng.beta(0.5, 0.8, 30)
        flat = np.array([rng.binomial(N, p) / N for _ in range(5)])
        found = trend(range(5), flat)
        alarms += found is not None and found.p_value <= LEVEL
    assert alarms <= 10
