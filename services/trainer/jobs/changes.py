"""What of a stopped job may change before it goes on: how it is spread, never what it learns."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.trainer.jobs.submission import Problem, Refused, read_document
from shared.job import Job
from shared.job_actor import (
    EnvironmentSection,
    OffloadSection,
    ParallelSection,
    RecomputeSection,
    WatchdogSection,
)
from shared.job_cluster import ClusterSection

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


class OptimizerChanges(BaseModel):
    """What of `actor.optimizer` may change."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    offload: OffloadSection | None = None
    """What of the optimiser's state is in host memory."""


class ActorChanges(BaseModel):
    """What of `actor` may change."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    parallel: ParallelSection | None = None
    """Sizes of the groups of ranks."""
    recompute: RecomputeSection | None = None
    """Activations that are computed again instead of being kept."""
    optimizer: OptimizerChanges | None = None
    """Where its state is."""
    max_tokens_per_gpu: int | None = Field(None, gt=0)
    """Tokens of one micro-batch at most."""
    env: EnvironmentSection | None = None
    """Transport and determinism of the ranks."""
    watchdog: WatchdogSection | None = None
    """When ranks count as stalled."""


class Changes(BaseModel):
    """Parts of a job's document, in its form; what is left out stays as it is."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    cluster: ClusterSection | None = None
    """Nodes and ranks."""
    actor: ActorChanges | None = None
    """How the actor is spread."""


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
