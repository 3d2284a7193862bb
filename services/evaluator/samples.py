"""The samples of one evaluation, and the file that keeps them while they come in.

`<stem>.partial.jsonl` gets one line per finished problem under a header that says which evaluation
it is; a restart goes on after its last whole line. The finished file `<stem>.jsonl` has the same
lines in the suite's order and appears whole.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.evaluator.plan import Plan
from shared.messages import FinishReason, Outcome

log = structlog.get_logger()

CORRECT_SCORE = 1.0  # less than the full score is not a right answer


def is_correct(outcome: Outcome) -> bool:
    return outcome.kind == "score" and outcome.value >= CORRECT_SCORE


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GradedSample(_Line):
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


class ProblemResult(_Line):
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


class Header(_Line):
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
            asked=plan.asked,
            began_at_s=began_at_s,
        )

    def is_of_same_evaluation(self, other: "Header") -> bool:
        unknown = {"asked": None} if self.asked is None else {}
        return self == other.model_copy(update={"began_at_s": self.began_at_s} | unknown)


class SampleFile:
    """Finished problems of one evaluation, durable one by one; `began_at_s` outlives restarts."""

    def __init__(self, stem: Path, plan: Plan, *, now_s: float) -> None:
        self.path = stem.with_name(stem.name + ".jsonl")
        self._partial = stem.with_name(stem.name + ".partial.jsonl")
        self._header = Header.of(plan, began_at_s=now_s)
        self.results: dict[int, ProblemResult] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._take_up(self.path if self.path.exists() else self._partial)

    @property
    def began_at_s(self) -> float:
        return self._header.began_at_s

    def add(self, result: ProblemResult) -> None:
        """Keep one finished problem."""
        self.results[result.row] = result
        with self._partial.open("a") as file:
            file.write(result.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> list[ProblemResult]:
        """Write the finished file, and give the results in the suite's order."""
        ordered = [self.results[row] for row in self._header.rows]
        self._write(self.path, ordered)
        self._partial.unlink(missing_ok=True)
        return ordered

    def _take_up(self, source: Path) -> None:
        header, lines = _read(source)
        if header is not None and header.is_of_same_evaluation(self._header):
            self._header = header
            self.results = _results(lines)
            log.info("evaluation_taken_up", path=str(source), problems=len(self.results))
        elif header is not None:
            log.warning("other_evaluation_replaced", path=str(source), eval_id=header.eval_id)
        self._write(self._partial, self.results.values())

    def _write(self, path: Path, results: Iterable[ProblemResult]) -> None:
        building = path.with_name(f".{path.name}.building")
        with building.open("w") as file:
            file.write(self._header.model_dump_json() + "\n")
            file.writelines(result.model_dump_json() + "\n" for result in results)
            file.flush()
            os.fsync(file.fileno())
        building.rename(path)


def read_samples(path: Path) -> tuple[Header, list[ProblemResult]]:
    """A finished file; ValueError if it is none."""
    header, lines = _read(path)
    if header is None:
        raise ValueError(f"{path}: no file of evaluation samples")
    return header, list(_results(lines).values())


def _read(path: Path) -> tuple[Header | None, list[str]]:
    if not path.exists():
        return None, []
    first, *rest = path.read_text().split("\n")
    try:
        return Header.model_validate_json(first), rest
    except ValidationError:
        return None, []


def _results(lines: list[str]) -> dict[int, ProblemResult]:
    """Whole lines by row; the last one may have been cut off by a crash."""
    found: dict[int, ProblemResult] = {}
    for line in lines:
        try:
            result = ProblemResult.model_validate_json(line)
        except ValidationError:
            break
        found[result.row] = result
    return found


def write_summary(path: Path, summary: dict[str, object]) -> None:
    """`<stem>.json` beside the samples: what was published about them."""
    building = path.with_name(f".{path.name}.building")
    building.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    building.rename(path)
