"""Finished evaluations on disk: `<runs_dir>/<job>/evals/<stem>.jsonl` and `.json` beside it.

Everything here blocks. Names come from people: what is no plain file name finds nothing.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.evaluator.checkpoint import OFFLINE
from services.evaluator.comparison import Comparison, asked_differently, compare, shares
from services.evaluator.samples import Header, ProblemResult, read_samples
from services.evaluator.trend import Trend, trend

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


class NoEvaluation(LookupError):
    """There is none of that name."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One evaluation: `name` is 'job/stem', `result` are the fields of `eval_finished`."""

    job_id: str
    stem: str
    result: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.job_id}/{self.stem}"


class Archive:
    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir

    def all(self) -> list[Finished]:
        """By job, then suite, then version."""
        found = list(self._find("*", "*"))
        return sorted(found, key=lambda one: (one.job_id, *_place(one.result)))

    def of_job(self, job_id: str) -> list[Finished]:
        """By suite, then version."""
        return sorted(self._find(_checked(job_id), "*"), key=lambda one: _place(one.result))

    def get(self, job_id: str, stem: str) -> Finished:
        for one in self._find(_checked(job_id), _checked(stem)):
            return one
        raise NoEvaluation(f"no finished evaluation {job_id}/{stem}")

    def samples(self, job_id: str, stem: str) -> tuple[Header, list[ProblemResult]]:
        path = self._runs_dir / _checked(job_id) / "evals" / f"{_checked(stem)}.jsonl"
        try:
            return read_samples(path)
        except ValueError as err:
            raise NoEvaluation(f"no samples of {job_id}/{stem}") from err

    def compare(self, before: str, after: str) -> Comparison:
        """Two evaluations by their names, 'job/stem'."""
        pair = [self.samples(*_split(name)) for name in (before, after)]
        return compare(pair[0], pair[1])

    def trends(self, job_id: str) -> dict[str, tuple[list[Finished], Trend | None]]:
        """The versions of each suite of a run that were asked alike, and the line through them."""
        by_suite: dict[str, list[Finished]] = {}
        first: dict[str, dict[str, Any]] = {}
        for one in self.of_job(job_id):
            suite, asked = str(one.result["suite"]), one.result.get("asked") or {}
            differently = asked_differently(first.setdefault(suite, asked), asked)
            by_suite.setdefault(", ".join([suite, *differently]), []).append(one)
        is_run = job_id != OFFLINE  # what else lies there are checkpoints of anybody
        return {
            suite: (found, self._trend(found) if is_run else None)
            for suite, found in by_suite.items()
        }

    def _trend(self, found: list[Finished]) -> Trend | None:
        """Over the problems that all have.

        A version and a seed count once, whoever asked: the samples are the same, and no news.
        """
        once: dict[tuple[int, int], tuple[Finished, list[ProblemResult]]] = {}
        for one in found:
            header, problems = self.samples(one.job_id, one.stem)
            key = (header.policy_version, header.seed)
            if key not in once or len(problems) > len(once[key][1]):
                once[key] = (one, problems)
        keyed = [
            {(p.prompt, p.gold): p for p in problems if p.samples} for _, problems in once.values()
        ]
        common = [key for key in keyed[0] if all(key in one for one in keyed)]
        if not common:
            return None
        values = [shares([one[key] for key in common], 1) for one in keyed]
        line = trend([one.result["step"] for one, _ in once.values()], np.array(values))
        return line and replace(line, num_repeated=len(found) - len(once))

    def _find(self, job_id: str, stem: str) -> Iterator[Finished]:
        for path in self._runs_dir.glob(f"{job_id}/evals/{stem}.json"):
            try:
                result = json.loads(path.read_text())
                _place(result)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being written, or no result of ours
            if path.with_suffix(".jsonl").is_file():
                yield Finished(path.parent.parent.name, path.stem, result)


def _place(result: dict[str, Any]) -> tuple[str, int, str]:
    return str(result["suite"]), int(result["policy_version"]), str(result["eval_id"])


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise NoEvaluation(f"{name[:80]!r} is no name of an evaluation")
    return name


def _split(name: str) -> tuple[str, str]:
    job_id, slash, stem = name.partition("/")
    if not slash:
        raise NoEvaluation(f"{name[:80]!r} is not written as job/evaluation")
    return job_id, stem
