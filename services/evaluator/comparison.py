"""Two evaluations of one suite, problem by problem: what changed, how surely, and in which way.

Only problems that both have are compared, matched by prompt and gold. A change is called one when
the sign-flip test says so at `LEVEL`; each k is a test of its own. Intervals are the usual 95 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from services.evaluator.samples import Header, ProblemResult
from services.evaluator.statistics import Array, Interval, paired_changes, pass_at_k
from shared.statistics import LEVEL, shown_ks, sign_flip_p

COVERAGE_K = 8

Verdict = Literal["coverage", "sharpening", "undecided"]


class NotComparable(ValueError):
    """The two evaluations have no problem in common."""


@dataclass(frozen=True, slots=True)
class Change:
    """pass@k before and after, and the paired difference over problems."""

    k: int
    before: float
    after: float
    difference: Interval
    p_value: float

    @property
    def is_significant(self) -> bool:
        return self.p_value <= LEVEL


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem in both evaluations."""

    before: ProblemResult
    after: ProblemResult

    @property
    def is_gained(self) -> bool:
        """Solved at least once now, never before."""
        return self.before.num_correct == 0 < self.after.num_correct

    @property
    def is_lost(self) -> bool:
        return self.after.num_correct == 0 < self.before.num_correct


@dataclass(frozen=True, slots=True)
class Comparison:
    pairs: list[Pair]
    num_only_before: int
    num_only_after: int
    changes: dict[int, Change]
    verdict: Verdict
    asked_differently: list[str]  # such as "temperature 0.6 → 1.0"; empty where nothing is known

    @property
    def is_judged(self) -> bool:
        """Whether what changed is the policy's doing: only where both were asked alike."""
        return not self.asked_differently

    @property
    def gained(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.is_gained]

    @property
    def lost(self) -> list[Pair]:
        """Like `gained`, a matter of luck where one side had more samples a problem."""
        return [pair for pair in self.pairs if pair.is_lost]


def compare(
    before: tuple[Header, Sequence[ProblemResult]], after: tuple[Header, Sequence[ProblemResult]]
) -> Comparison:
    """Pair two evaluations; `NotComparable` names what is wrong with them.

    Where they were asked differently nothing is said about the policy: no verdict.
    """
    earlier = {(one.prompt, one.gold): one for one in before[1]}
    later = {(one.prompt, one.gold): one for one in after[1]}
    pairs = [Pair(one, later[key]) for key, one in earlier.items() if key in later]
    if not pairs:
        raise NotComparable(
            f"{before[0].eval_id} ({before[0].suite}) and {after[0].eval_id} ({after[0].suite}) "
            "have no problem in common"
        )
    most = min(before[0].samples_per_problem, after[0].samples_per_problem)
    changes = _changes(pairs, shown_ks(most))
    differently = asked_differently(before[0].asked, after[0].asked)
    return Comparison(
        pairs=pairs,
        num_only_before=len(earlier) - len(pairs),
        num_only_after=len(later) - len(pairs),
        changes=changes,
        verdict="undecided" if differently else _verdict(pairs, changes),
        asked_differently=differently,
    )


def asked_differently(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[str]:
    """In what the two ways of asking differ."""
    if not before or not after:
        return []
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name)} → {after.get(name)}" for name in names]


def shares(results: Sequence[ProblemResult], k: int) -> Array:
    """[P]: pass@k of each problem, from all samples that it has."""
    return np.array([pass_at_k(len(r.samples), r.num_correct, k) for r in results], np.float64)


def _changes(pairs: Sequence[Pair], ks: Sequence[int]) -> dict[int, Change]:
    """All from the same resampled problems."""
    before_KP = [shares([pair.before for pair in pairs], k) for k in ks]
    after_KP = [shares([pair.after for pair in pairs], k) for k in ks]
    intervals = paired_changes(np.stack(before_KP, axis=1), np.stack(after_KP, axis=1))
    return {
        k: Change(k, float(before.mean()), float(after.mean()), found, sign_flip_p(after - before))
        for k, before, after, found in zip(ks, before_KP, after_KP, intervals, strict=True)
    }


def _verdict(pairs: Sequence[Pair], changes: dict[int, Change]) -> Verdict:
    """Which problems can be solved at all, or how reliably those that could be are solved?

    coverage: pass@8 rises. sharpening: pass@1 rises and rises more than pass@8, which does not.
    The distinction is that of Yue et al., "Does Reinforcement Learning Really Incentivize Reasoning
    Capacity in LLMs Beyond the Base Model?" (2025, arXiv 2504.13837).
    """
    wide = changes.get(COVERAGE_K)
    if wide is None:
        return "undecided"
    if wide.is_significant and wide.difference.mean > 0:
        return "coverage"
    narrow = changes[1]
    if not narrow.is_significant or narrow.difference.mean <= 0:
        return "undecided"
    contrast_P = _rise(pairs, 1) - _rise(pairs, COVERAGE_K)
    rises_more = contrast_P.mean() > 0 and sign_flip_p(contrast_P) <= LEVEL
    return "sharpening" if rises_more else "undecided"


def _rise(pairs: Sequence[Pair], k: int) -> Array:
    """[P]: how much pass@k of each problem rose."""
    return shares([p.after for p in pairs], k) - shares([p.before for p in pairs], k)
