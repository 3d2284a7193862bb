"""From graded samples to the numbers that are published as `eval_finished`."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.evaluator.plan import Plan
from services.evaluator.samples import GradedSample, ProblemResult, is_correct
from services.evaluator.statistics import (
    Array,
    Interval,
    pass_curve,
    ratio_interval,
    sampling_interval,
    share_intervals,
)

OUTCOMES = ("score", "unparseable", "timeout", "error")
QUANTILES = {"50": 0.5, "90": 0.9, "100": 1.0}


def summarise(plan: Plan, results: Sequence[ProblemResult], *, seconds: float) -> dict[str, Any]:
    """The fields of `eval_finished`; `results` are in the suite's order and complete.

    A sample that was not graded (unparseable, timeout, error) is not right, and is counted.
    """
    n = plan.samples_per_problem
    correct = [result.num_correct for result in results]
    intervals = share_intervals(pass_curve(correct, n))
    by_k = {str(k): found for k, found in enumerate(intervals, 1)}
    samples = [sample for result in results for sample in result.samples]
    outcomes = dict.fromkeys(OUTCOMES, 0) | Counter(s.outcome.kind for s in samples)
    return {
        "eval_id": plan.eval_id,
        "suite": plan.suite,
        "policy_version": plan.policy_version,
        "step": plan.step,
        "num_problems": len(results),
        "num_samples": len(samples),
        "samples_per_problem": n,
        "asked": plan.asked,
        "pass_at_k": {k: found.mean for k, found in by_k.items()},
        "pass_at_k_ci": {k: _bounds(found) for k, found in by_k.items()},
        "pass_at_1_ci": _bounds(intervals[0]),
        "pass_at_1_sampling_ci": _bounds(sampling_interval(correct, n)),
        **_lengths(samples),
        "budgets": [at_budget(results, budget) for budget in _budgets(plan)],
        "outcomes": outcomes,
        "unparseable_share": outcomes["unparseable"] / len(samples),
        "timeout_share": outcomes["timeout"] / len(samples),
        "skipped_problems": plan.num_skipped,
        "seconds": round(seconds, 3),
        "per_problem_correct": correct,
        "rows": [result.row for result in results],
    }


def _lengths(samples: Sequence[GradedSample]) -> dict[str, Any]:
    """Response lengths in tokens, how many were cut, and pass@1 of those that were not."""
    tokens = np.array([len(sample.token_ids) for sample in samples], np.float64)
    ended = [sample for sample in samples if sample.finish_reason != "length"]
    right = sum(sample.is_correct for sample in ended)
    return {
        "truncated_share": 1 - len(ended) / len(samples),
        "pass_at_1_untruncated": right / len(ended) if ended else None,
        "response_tokens_mean": float(tokens.mean()),
        "response_tokens_quantiles": {
            name: float(np.quantile(tokens, at)) for name, at in QUANTILES.items()
        },
    }


def at_budget(results: Sequence[ProblemResult], budget: int) -> dict[str, Any]:
    """What the same samples say under a smaller response budget: pass@1, how many it would have
    cut, and pass@1 of the others, each with its interval over problems."""
    judged = [[sample.at(budget) for sample in result.samples] for result in results]
    right_P = _counts([[is_correct(outcome) for outcome, _ in one] for one in judged])
    whole_P = _counts([[not was_cut for _, was_cut in one] for one in judged])
    right_whole_P = _counts(
        [[is_correct(outcome) and not was_cut for outcome, was_cut in one] for one in judged]
    )
    num_P = _counts([[True] * len(one) for one in judged])
    (pass_at_1,) = share_intervals((right_P / num_P)[:, None])
    untruncated = ratio_interval(right_whole_P, whole_P)
    return {
        "budget": budget,
        "pass_at_1": pass_at_1.mean,
        "pass_at_1_ci": _bounds(pass_at_1),
        "truncated_share": 1 - float(whole_P.sum() / num_P.sum()),
        "pass_at_1_untruncated": None if math.isnan(untruncated.mean) else untruncated.mean,
        "pass_at_1_untruncated_ci": _bounds(untruncated),
        "num_untruncated": int(whole_P.sum()),
    }


def _budgets(plan: Plan) -> list[int]:
    """The smaller ones and the one that was sampled with; none if only that was asked for."""
    return [*plan.budgets, plan.sampling.max_response_tokens] if plan.budgets else []


def _counts(flags: Sequence[Sequence[bool]]) -> Array:
    """[P]: how many of each problem's samples."""
    return np.array([sum(one) for one in flags], np.float64)


def _bounds(found: Interval) -> list[float] | None:
    return None if math.isnan(found.low) else [found.low, found.high]
