"""The samples of one finished evaluation: `<stem>.jsonl`, a header, then one line a problem.

How they come together, and what a restart goes on from: `sample_file.py`.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.evaluator.plan import Plan, Problem
from shared.messages import FinishReason, Outcome

CORRECT_SCORE = 1.0  # less than the full score is not a right answer


def is_correct(outcome: Outcome) -> bool:
    return outcome.kind == "score" and outcome.value >= CORRECT_SCORE


class Line(BaseModel):
    """One line of a file of samples."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class GradedSample(Line):
    """One completion and what the grader said."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    outcome: Outcome
    cut: dict[int, Outcome] = {}
    """Budget -> outcome of the first so many tokens, where the sample is longer."""

    @property
    def is_correct(self) -> bool:
        return is_correct(self.outcome)

    def at(self, budget: int) -> tuple[Outcome, bool]:
        """What a response budget would have given, and whether it would have cut the sample.

        Sampling goes from left to right, so the first tokens are those of a smaller budget.
        """
        if budget in self.cut:
            return self.cut[budget], True
        return self.outcome, self.finish_reason == "length"


class ProblemResult(Line):
    """All samples of one problem."""

    row: int
    source: str
    prompt: str
    gold: str
    policy_version: int
    samples: list[GradedSample]

    @property
    def num_correct(self) -> int:
        return sum(sample.is_correct for sample in self.samples)


class Header(Line):
    """Which evaluation a file belongs to; lines under another header are never used."""

    format: Literal[1] = 1
    eval_id: str
    suite: str
    policy_version: int
    samples_per_problem: int
    seed: int
    budgets: list[int] = []
    max_response_tokens: int | None = None
    step: int | None = None
    rows: list[int] = Field(description="the problems to do, in the suite's order")
    questions: str = Field("", description="digest of their tokens and gold answers")
    grading_timeout_s: float | None = Field(None, description="None in files that do not say")
    asked: dict[str, Any] | None = Field(None, description="how; None in files that do not say")
    began_at_s: float = 0.0

    @classmethod
    def of(cls, plan: Plan, *, began_at_s: float) -> Self:
        return cls(
            eval_id=plan.eval_id,
            suite=plan.suite,
            policy_version=plan.policy_version,
            samples_per_problem=plan.samples_per_problem,
            seed=plan.seed,
            budgets=plan.budgets,
            max_response_tokens=plan.sampling.max_response_tokens,
            step=plan.step,
            rows=[problem.row for problem in plan.problems],
            questions=_digest(plan.problems),
            grading_timeout_s=plan.grading_timeout_s,
            asked=plan.asked,
            began_at_s=began_at_s,
        )

    def is_of_same_evaluation(self, other: "Header") -> bool:
        return self == other.model_copy(update={"began_at_s": self.began_at_s})


def _digest(problems: Sequence[Problem]) -> str:
    """A row number says which line it was, not what stood there."""
    digest = blake2b(digest_size=16)
    for problem in problems:
        digest.update(json.dumps([problem.row, problem.token_ids, problem.gold]).encode())
    return digest.hexdigest()


def read_samples(path: Path) -> tuple[Header, list[ProblemResult]]:
    """A finished file; ValueError if it is none."""
    header, lines = read_lines(path)
    if header is None:
        raise ValueError(f"{path}: no file of evaluation samples")
    return header, problems_of(lines)


def read_lines(path: Path) -> tuple[Header | None, list[bytes]]:
    """A file's header, if it has one, and what follows it; the last line may end anywhere."""
    if not path.exists():
        return None, []
    first, *rest = path.read_bytes().split(b"\n")
    try:
        return Header.model_validate_json(first), rest
    except ValidationError:
        return None, []


def problems_of(lines: list[bytes]) -> list[ProblemResult]:
    """The last line of each row, up to the first line that is no problem."""
    found: dict[int, ProblemResult] = {}
    for line in lines:
        try:
            result = ProblemResult.model_validate_json(line)
        except ValidationError:
            break
        found[result.row] = result
    return list(found.values())


def write_summary(path: Path, summary: dict[str, object]) -> None:
    """`<stem>.json` beside the samples: what was published about them."""
    building = path.with_name(f".{path.name}.building")
    building.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    building.rename(path)
