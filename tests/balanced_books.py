"""What the books of a finished run must say, whatever was killed on the way."""

import sqlite3
from pathlib import Path
from typing import Any


def check_books(
    path: Path, summary: dict[str, Any], *, steps: int, groups_per_step: int = 16
) -> None:
    """Every step was taken, with its number of groups, and no group was trained twice."""
    db = sqlite3.connect(path)
    groups = db.execute("SELECT group_id, state, step FROM groups").fetchall()
    taken = db.execute("SELECT step, result FROM steps ORDER BY step").fetchall()
    db.close()
    assert len({group_id for group_id, _, _ in groups}) == len(groups)
    assert [step for step, _ in taken] == list(range(1, steps + 1))
    for step, result in taken:
        assert result is not None
        trained = sum(1 for _, state, of in groups if state == "trained" and of == step)
        assert trained == groups_per_step, f"step {step} trained {trained} groups"
    num_trained = sum(1 for _, state, _ in groups if state == "trained")
    assert summary["groups"]["trained"] == num_trained == groups_per_step * steps
