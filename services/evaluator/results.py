"""From graded samples to the numbers that are published as `eval_finished`."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.evaluator.plan import Plan
from services.evaluator.samples import GradedSample, ProblemResult
from services.evaluator.statistics import (
    Interval,
    pass_curve,
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
    by_k = {str(k): found for k, found in enumerate(intervals, 1) if k in reported_ks(n)}
    samples = [sample for result in results for sample in result.samples]
    return {
        "eval_id": plan.eval_id,
        "suite": plan.suite,
        "policy_version": plan.policy_version,
        "step": plan.step,
        "num_problems": len(results),
        "num_samples": len(samples),
        "samples_per_problem": n,
        "pass_at_k": {k: found.mean for k, found in by_k.items()},
        "pass_at_k_ci": {k: _bounds(found) for k, found in by_k.items()},
        "pass_at_1_ci": _bounds(intervals[0]),
        "pass_at_1_sampling_ci": _bounds(sampling_interval(correct, n)),
        **_lengths(samples),
        "outcomes": dict.fromkeys(OUTCOMES, 0) | Counter(s.outcome.kind for s in samples),
        "skipped_problems": plan.num_skipped,
        "seconds": round(seconds, 3),
        "per_problem_correct": correct,
        "rows": [result.row for result in results],
    }


def reported_ks(num_samples: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


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


def _bounds(found: Interval) -> list[float] | None:
    return None if math.isnan(found.low) else [found.low, found.high]
