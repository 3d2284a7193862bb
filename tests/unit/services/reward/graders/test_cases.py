"""Tables of cases: our own, and a file of them where there is one.

A row has response, gold, what is expected of it and, where the rule could be another, `kind`
"policy": docs/evaluation.md states it. `python -m scripts.grade_cases FILE` shows the same table.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from services.reward.graders.grader import BUILT_IN, load_grader
from shared.messages import Score

OWN = Path("tests/fixtures/grading/cases.jsonl")
GIVEN = Path(os.environ.get("MATH_CASES", "../shared/cases/math_cases.jsonl"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    # Not splitlines: a line separator may be part of a response.
    return [json.loads(line) for line in path.read_text().split("\n") if line.strip()]


def by_note(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[f"{row.get('grader', 'math')}: {row['note']}"].append(row)
    return found


def judged_otherwise(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What is not judged as expected, in words."""
    wrong = []
    for row in rows:
        grade = load_grader(BUILT_IN[row.get("grader", "math")])
        outcome = grade(row["response"], str(row["gold"])) if str(row["gold"]).strip() else None
        is_right = isinstance(outcome, Score) and outcome.value == 1.0
        if is_right != (row["expected"] == "correct"):
            wrong.append(
                f"{row['id']} is {row['expected']}, but {outcome}: {row['response'][-60:]}"
            )
    return wrong


TABLE = by_note(rows_of(OWN))


@pytest.mark.parametrize("note", TABLE)
def test_own_cases_are_judged_as_expected(note: str) -> None:
    assert judged_otherwise(TABLE[note]) == []


def test_own_cases_are_many_and_of_both_kinds() -> None:
    rows = rows_of(OWN)
    assert len({row["id"] for row in rows}) == len(rows) > 1000
    assert min(sum(row["expected"] == e for row in rows) for e in ("correct", "incorrect")) > 400


@pytest.mark.skipif(not GIVEN.is_file(), reason=f"no file {GIVEN}; MATH_CASES names another one")
def test_given_cases_are_judged_as_expected() -> None:
    """Each as if it were graded by itself; an empty gold is an error, which is not correct."""
    rows = rows_of(GIVEN)
    assert rows
    assert judged_otherwise(rows) == []
