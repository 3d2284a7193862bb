"""Evaluations by policy version, and the paired difference between two of them.

The same problems are asked of each version, so their difficulty cancels: the interval of a
difference is taken over per-problem differences, not over two separate intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from services.trainer.report.events import RunEvents
from shared.messages import Event
from shared.statistics import LEVEL, paired_difference, shown_ks, sign_flip_p

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One finished evaluation; k is written as text ("1", "2", ...) as in JSON."""

    policy_version: int
    step: int
    suite: str
    num_problems: int
    samples_per_problem: int
    pass_at_k: dict[str, float]
    pass_at_k_ci: dict[str, tuple[float, float]]
    truncated_share: float | None
    response_tokens_mean: float | None
    outcomes: dict[str, int]
    skipped_problems: int
    seconds: float | None
    correct: list[int]  # right samples by problem
    rows: list[int]  # which rows of the suite the problems are

    @property
    def shares_correct(self) -> list[float]:
        return [num / self.samples_per_problem for num in self.correct]


@dataclass(frozen=True, slots=True)
class Comparison:
    """pass@1 of `after` minus `before`, mean over problems with its 95 % interval."""

    before_version: int
    after_version: int
    num_problems: int
    pass_at_1_before: float
    pass_at_1_after: float
    difference: float
    low: float
    high: float
    p_value: float  # of the sign-flip test, which alone says whether there is a change

    @property
    def is_significant(self) -> bool:
        return self.p_value <= LEVEL


def finished_evaluations(run: RunEvents) -> list[Evaluation]:
    """By version; an evaluation that was delivered twice counts once, the last one.

    An event that lacks what an evaluation has is left out: it must not cost the run its report.
    """
    by_version: dict[int, Evaluation] = {}
    for event in run.named("eval_finished"):
        try:
            evaluation = _evaluation(event.fields)
        except (KeyError, TypeError, ValueError, IndexError) as err:
            log.warning("evaluation_unreadable", fields=event.fields, error=repr(err))
            continue
        by_version[evaluation.policy_version] = evaluation
    return [by_version[version] for version in sorted(by_version)]


def failed_evaluations(run: RunEvents) -> list[Event]:
    """The last failure of each one that has no result: the trainer and the evaluator may both have
    told of it, and a result may have come after it was given up."""
    finished = {event.fields.get("eval_id") for event in run.named("eval_finished")}
    failed = {event.fields.get("eval_id"): event for event in run.named("eval_failed")}
    return [event for eval_id, event in failed.items() if eval_id not in finished]


def compare(before: Evaluation, after: Evaluation) -> Comparison | None:
    """None when the two did not grade the same problems."""
    if not before.correct or len(before.correct) != len(after.correct) or before.rows != after.rows:
        return None
    shares_before, shares_after = before.shares_correct, after.shares_correct
    change = paired_difference(shares_before, shares_after)
    return Comparison(
        before_version=before.policy_version,
        after_version=after.policy_version,
        num_problems=change.num,
        pass_at_1_before=sum(shares_before) / change.num,
        pass_at_1_after=sum(shares_after) / change.num,
        difference=change.mean,
        low=change.low,
        high=change.high,
        p_value=sign_flip_p(np.subtract(shares_after, shares_before)),
    )


def shown_of(evaluations: Sequence[Evaluation]) -> list[str]:
    """The k that tables and figures of these evaluations show."""
    shown = {str(k) for one in evaluations for k in shown_ks(one.samples_per_problem)}
    return sorted(shown & {k for one in evaluations for k in one.pass_at_k}, key=int)


def compare_to_first(evaluations: list[Evaluation]) -> Comparison | None:
    """The last version against the first one evaluated; None below two evaluations."""
    return compare(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else None


def _evaluation(fields: dict[str, Any]) -> Evaluation:
    num_problems = int(fields["num_problems"])
    intervals = dict(fields.get("pass_at_k_ci") or {})
    if fields.get("pass_at_1_ci"):
        intervals["1"] = fields["pass_at_1_ci"]
    return Evaluation(
        policy_version=int(fields["policy_version"]),
        step=int(fields.get("step", fields["policy_version"])),
        suite=str(fields.get("suite", "")),
        num_problems=num_problems,
        samples_per_problem=int(fields["samples_per_problem"]),
        pass_at_k={str(k): float(value) for k, value in dict(fields["pass_at_k"]).items()},
        pass_at_k_ci={str(k): (float(ci[0]), float(ci[1])) for k, ci in intervals.items() if ci},
        truncated_share=fields.get("truncated_share"),
        response_tokens_mean=fields.get("response_tokens_mean"),
        outcomes={str(kind): int(num) for kind, num in dict(fields.get("outcomes") or {}).items()},
        skipped_problems=int(fields.get("skipped_problems") or 0),
        seconds=fields.get("seconds"),
        correct=[int(num) for num in fields.get("per_problem_correct") or []],
        rows=[int(row) for row in fields.get("rows") or []],
    )
