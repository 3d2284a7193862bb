"""The usual suites in the forms that their public copies have, with made-up problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.data import DataError, load_rows
from shared.data.suites import SUITES
from shared.job_data import DataSection

FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("aime-2024", {"ID": "2024-I-1", "Problem": "Find it.", "Solution": "x", "Answer": 73}, "73"),
    ("aime-2024", {"problem": "Find it.", "answer": "073", "url": "u", "year": "2024"}, "073"),
    ("aime-2025", {"problem": "Find it.", "answer": "70", "id": 0}, "70"),
    ("aime-2025", {"question": "Find it.", "answer": "588"}, "588"),
    ("aime-2025", {"problem": "Find it.", "answer": r"$\boxed{16}$", "solution": "s"}, "16"),
    (
        "math-500",
        {"problem": "Find it.", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2},
        r"\frac{1}{2}",
    ),
    ("gsm8k", {"question": "Find it.", "answer": "First 2.\n#### 1,200"}, "1200"),
]


def load(name: str, tmp_path: Path, row: dict[str, Any]) -> Any:
    suite, path = SUITES[name], tmp_path / "suite.jsonl"
    path.write_text(json.dumps(row) + "\n")
    section = DataSection(
        path=str(path), format=suite.format, prompt_template=suite.prompt_template
    )
    return load_rows(section)


@pytest.mark.parametrize(("name", "row", "gold"), FORMS)
def test_every_public_form_gives_problem_and_gold(
    name: str, row: dict[str, Any], gold: str, tmp_path: Path
) -> None:
    (found,) = load(name, tmp_path, row)
    assert (found.problem, found.gold) == ("Find it.", gold)
    assert found.prompt.startswith("Find it.\nPlease reason step by step")
    assert r"\boxed{}" in found.prompt


def test_an_answer_that_aime_cannot_have_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: answer '1000' is no integer from 0 to 999"):
        load("aime-2025", tmp_path, {"problem": "Find it.", "answer": "1000"})
