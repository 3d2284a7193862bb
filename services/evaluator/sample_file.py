"""The file that keeps an evaluation's samples while they come in, one by one.

`<stem>.partial.jsonl` gets a line when a sample is drawn and another when it is judged, under a
header that says which evaluation it is; a restart goes on after its last whole line. The finished
file `<stem>.jsonl` has one line a problem in the suite's order and appears whole.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from services.evaluator.plan import Plan, Problem
from services.evaluator.samples import (
    GradedSample,
    Header,
    Line,
    ProblemResult,
    problems_of,
    read_lines,
)
from shared.messages import FinishReason, Outcome

log = structlog.get_logger()

Place = tuple[int, int]
"""A problem's row and the number of its sample."""


class Drawn(Line):
    """Sample `index` of a problem as the policy gave it."""

    kind: Literal["drawn"] = "drawn"
    row: int
    index: int
    policy_version: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


class Judged(Line):
    """What the grader said of that sample, and of what smaller budgets would have left of it."""

    kind: Literal["judged"] = "judged"
    row: int
    index: int
    outcome: Outcome
    cut: dict[int, Outcome] = Field(default_factory=dict)


_LINE: TypeAdapter[Drawn | Judged] = TypeAdapter(
    Annotated[Drawn | Judged, Field(discriminator="kind")]
)


class SampleFile:
    """Samples of one evaluation, durable one by one; `began_at_s` outlives restarts."""

    def __init__(self, stem: Path, plan: Plan, *, now_s: float) -> None:
        self.path = stem.with_name(stem.name + ".jsonl")
        self._partial = stem.with_name(stem.name + ".partial.jsonl")
        self._header = Header.of(plan, began_at_s=now_s)
        self._problems = {problem.row: problem for problem in plan.problems}
        self._num_judged: Counter[int] = Counter()
        self.drawn: dict[Place, Drawn] = {}
        self.judged: dict[Place, Judged] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._take_up()

    @property
    def began_at_s(self) -> float:
        return self._header.began_at_s

    @property
    def num_finished(self) -> int:
        """Problems all of whose samples are judged."""
        complete = self._header.samples_per_problem
        return sum(number == complete for number in self._num_judged.values())

    def add(self, line: Drawn | Judged) -> None:
        """Keep a sample, or what was said of it.

        A drawn one outlives this process, a judged one the machine: what a power cut takes is drawn
        again under the same seed. ValueError for a sample of another version.
        """
        self._note(line)
        with self._partial.open("a", encoding="utf-8") as file:
            file.write(line.model_dump_json() + "\n")
            file.flush()
            if isinstance(line, Judged):
                os.fsync(file.fileno())

    def finish(self) -> list[ProblemResult]:
        """Write the finished file, and give the results in the suite's order."""
        results = [self._result(self._problems[row]) for row in self._header.rows]
        self._write(self.path, results)
        self._partial.unlink(missing_ok=True)
        return results

    def _result(self, problem: Problem) -> ProblemResult:
        places = [(problem.row, i) for i in range(self._header.samples_per_problem)]
        return ProblemResult(
            row=problem.row,
            source=problem.source,
            prompt=problem.prompt,
            gold=problem.gold,
            policy_version=self._header.policy_version,
            samples=[_graded(self.drawn[place], self.judged[place]) for place in places],
        )

    def _take_up(self) -> None:
        """From the finished file, or, where that is another evaluation's, from the partial one."""
        for path, read in ((self.path, _of_problems), (self._partial, _whole)):
            header, lines = read_lines(path)
            if header is not None and header.is_of_same_evaluation(self._header):
                self._header = header
                self._note_kept(path, read(lines))
                break
            if header is not None:
                log.warning("other_evaluation_replaced", path=str(path), eval_id=header.eval_id)
        self._write(self._partial, [*self.drawn.values(), *self.judged.values()])

    def _note_kept(self, path: Path, lines: Iterable[Drawn | Judged]) -> None:
        for line in lines:
            if isinstance(line, Drawn) and line.policy_version != self._header.policy_version:
                log.warning("sample_of_another_version_left_out", path=str(path))
                break
            self._note(line)
        log.info("evaluation_taken_up", path=str(path), samples=len(self.judged))

    def _note(self, line: Drawn | Judged) -> None:
        place, version = (line.row, line.index), self._header.policy_version
        if isinstance(line, Judged):
            assert place in self.drawn, "a sample is judged after it was drawn"
            self._num_judged[line.row] += place not in self.judged
            self.judged[place] = line
        elif line.policy_version == version:
            self.drawn[place] = line
        else:
            raise ValueError(f"a sample of version {line.policy_version} among those of {version}")

    def _write(self, path: Path, lines: Iterable[BaseModel]) -> None:
        building = path.with_name(f".{path.name}.building")
        with building.open("w", encoding="utf-8") as file:
            file.write(self._header.model_dump_json() + "\n")
            file.writelines(line.model_dump_json() + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        building.rename(path)


def _graded(drawn: Drawn, judged: Judged) -> GradedSample:
    return GradedSample(
        text=drawn.text,
        token_ids=drawn.token_ids,
        finish_reason=drawn.finish_reason,
        outcome=judged.outcome,
        cut=judged.cut,
    )


def _whole(lines: list[bytes]) -> Iterator[Drawn | Judged]:
    """The last line may have been cut off by a crash."""
    for line in lines:
        try:
            yield _LINE.validate_json(line)
        except ValidationError:
            return


def _of_problems(lines: list[bytes]) -> Iterator[Drawn | Judged]:
    for result in problems_of(lines):
        yield from samples_of(result)


def samples_of(result: ProblemResult) -> Iterator[Drawn | Judged]:
    """A problem's samples as they were when they came in."""
    for index, sample in enumerate(result.samples):
        yield Drawn(
            row=result.row,
            index=index,
            policy_version=result.policy_version,
            text=sample.text,
            token_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
        )
        yield Judged(row=result.row, index=index, outcome=sample.outcome, cut=sample.cut)
