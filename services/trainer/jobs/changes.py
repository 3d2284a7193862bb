"""What of a stopped job may change before it goes on: how it is spread, never what it learns."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.trainer.jobs.submission import Problem, Refused, read_document
from shared.job import Job

CHANGEABLE = (
    "cluster",
    "actor.parallel",
    "actor.recompute",
    "actor.optimizer.offload",
    "actor.max_tokens_per_gpu",
    "actor.env",
    "actor.watchdog",
)
"""Checkpoints fit any layout, and each gives the same weights up to the order of sums."""


def changed(job: Job, changes: Mapping[str, Any]) -> Job:
    """The job with `changes`, in the form of its document; raises `Refused`."""
    problems = [
        Problem(key, value, "a job that goes on keeps this", CHANGEABLE)
        for key, value in _leaves(changes)
        if not any(f"{key}.".startswith(f"{one}.") for one in CHANGEABLE)
    ]
    if problems:
        raise Refused(problems)
    return read_document(_merged(job.model_dump(mode="json"), changes))


def _leaves(document: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        key = f"{within}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in changes.items():
        inner = merged.get(key)
        is_section = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = _merged(inner, value) if is_section else value  # type: ignore[arg-type]
    return merged
