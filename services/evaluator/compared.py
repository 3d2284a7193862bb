"""Two evaluations compared, as REST tells it."""

from pydantic import BaseModel, ConfigDict, Field

from services.evaluator.comparison import Comparison, Verdict


class _Answer(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", from_attributes=True, use_attribute_docstrings=True
    )


class MeanInterval(_Answer):
    """A mean with its 95 % interval."""

    mean: float
    """The mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


class PassChange(_Answer):
    """pass@k before and after, over the problems that both have."""

    k: int = Field(ge=1)
    """Of pass@k: a problem is solved if one of k samples is right."""
    before: float
    """pass@k of the earlier evaluation, 0 to 1."""
    after: float
    """pass@k of the later one, 0 to 1."""
    difference: MeanInterval
    """After minus before, paired by problem."""
    p_value: float
    """Of the paired sign-flip test that nothing changed, 0 to 1."""
    is_significant: bool
    """Whether the test calls it a change; never where both were asked differently."""


class ComparedEvals(_Answer):
    """What changed between two evaluations of one suite, problem by problem."""

    before: str
    """The earlier one, as job/evaluation."""
    after: str
    """The later one, as job/evaluation."""
    num_problems: int
    """Problems that both have; only they are compared."""
    changes: list[PassChange]
    """One for each k, from 1 up."""
    verdict: Verdict
    """`coverage`: more problems can be solved at all; `sharpening`: those that could be are solved
    more reliably; `undecided`: neither is certain."""
    asked_differently: list[str]
    """What differs in how they were asked, such as 'temperature 0.6 → 1.0'; then no change is
    called one."""
    gained: list[int]
    """Rows of the problems solved at least once now, and never before."""
    lost: list[int]
    """Rows of the problems solved at least once before, and never now."""


def told(found: Comparison, *, before: str, after: str) -> ComparedEvals:
    changes = [
        PassChange(
            k=one.k,
            before=one.before,
            after=one.after,
            difference=MeanInterval.model_validate(one.difference),
            p_value=one.p_value,
            is_significant=found.is_judged and one.is_significant,
        )
        for one in found.changes.values()
    ]
    return ComparedEvals(
        before=before,
        after=after,
        num_problems=len(found.pairs),
        changes=changes,
        verdict=found.verdict,
        asked_differently=found.asked_differently,
        gained=[pair.after.row for pair in found.gained],
        lost=[pair.after.row for pair in found.lost],
    )
