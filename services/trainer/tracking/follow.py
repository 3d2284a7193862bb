"""Follow a run's events and hand their numbers to writers, each line once."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.events import EVENTS_FILE, EventTail
from services.trainer.metrics_file import numbers_of
from services.trainer.tracking.writers import Writer

POSITION_FILE = "tracking.json"


def follow(run_dir: Path, writers: Sequence[Writer], *, wait: Callable[[], bool]) -> int:
    """Write what is there and what comes until `wait` says no; how many lines were read.

    `wait` sleeps a little, and is False once nothing more is to come.
    """
    position = run_dir / POSITION_FILE
    tail = EventTail(run_dir / EVENTS_FILE, after=_read(position))
    goes_on = True
    while goes_on:
        goes_on = wait()  # before the last look: what came until then is still read
        while lines := tail.read_more():
            for _, line in lines:
                _hand_on(json.loads(line), writers)
            for writer in writers:
                writer.flush()
            position.write_text(json.dumps({"line": tail.num_lines}) + "\n")
    return tail.num_lines


def numbers_to_tell(event: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Step and numbers by name of an event that has any: steps, evaluations."""
    fields = event["fields"]
    match event["name"]:
        case "step":
            return int(fields["step"]), dict(_of_step(fields))
        case "eval_finished" | "suite_finished":
            names = ("pass_at_k", "truncated_share", "response_tokens_mean", "seconds")
            found = {name: fields[name] for name in names if name in fields}
            numbers = numbers_of(found, f"eval/{fields.get('suite', '')}/")
            return int(fields["step"]), {_slashed(name): value for name, value in numbers}
    return None


def _of_step(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in numbers_of(fields):
        if name != "step":
            yield f"train/{_slashed(name)}", value


def _slashed(name: str) -> str:
    """Both libraries group names by their slashes."""
    return name.replace(".", "/")


def _hand_on(event: Mapping[str, Any], writers: Sequence[Writer]) -> None:
    found = numbers_to_tell(event)
    if found is not None:
        for writer in writers:
            writer.write(*found, float(event["at_s"]))


def _read(position: Path) -> int:
    return int(json.loads(position.read_text())["line"]) if position.exists() else 0
