"""metrics.jsonl of a run: one line a step with every number of it, by dotted name.

Like events.jsonl it is a copy of the books' journal; after a crash it goes on where it ends.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.trainer.books import Books

METRICS_FILE = "metrics.jsonl"


def numbers_of(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Finite numbers by dotted name: {"seconds": {"wait": 1.5}} gives ("seconds.wait", 1.5)."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}.")
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ):
            yield f"{prefix}{name}", value


class MetricsFile:
    def __init__(self, run_dir: Path, books: Books) -> None:
        self._path = run_dir / METRICS_FILE
        self._books = books
        self._seq = 0
        self._step = _last_step(self._path)
        self.flush()

    def flush(self) -> None:
        """Copy the steps that the journal has and the file lacks."""
        lines: list[str] = []
        for seq, body in self._books.journal(self._seq):
            self._seq = seq
            if body["name"] != "step" or (step := int(body["fields"]["step"])) <= self._step:
                continue
            self._step = step
            line = {"at_s": body["at_s"], **dict(numbers_of(body["fields"]))}
            lines.append(json.dumps(line) + "\n")
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)


def _last_step(path: Path) -> int:
    """Of the last whole line; half of one, that a crash left, is cut off."""
    if not path.exists():
        return 0
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(whole) + len(newline))
    last = whole.rpartition(b"\n")[2]
    return int(json.loads(last)["step"]) if last else 0
