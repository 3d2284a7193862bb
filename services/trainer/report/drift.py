"""What mean |Δ log p| a job's settings allow, so that a report can say whether it held.

Measured in docs/numerics.md. Two sides of unrounded FP32 at lag 0 differ by float noise alone; what
a step of training moves is part of every other figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the mean over a step's tokens."""

    value: float
    why: str


EXACT = Bound(1e-4, "FP32 on both sides at lag 0")
REPLAYED = Bound(0.02, "the sampler's experts replayed")
ROUNDED = Bound(0.04, "an FP8 sampler")


def drift_bound(job: Mapping[str, Any]) -> Bound:
    """The bound that the job document's settings promise."""
    actor, rollout = _part(job, "actor"), _part(job, "rollout")
    unrounded = (
        rollout.get("weights") == "float32"
        and not rollout.get("quantise_activations", True)
        and actor.get("quantisation", "none") == "none"
        and actor.get("dtype") == "float32"
        and actor.get("precision", "dtype") == "dtype"
    )
    if unrounded and _part(job, "algorithm").get("max_lag", 0) == 0:
        return EXACT
    return REPLAYED if _part(actor, "replay").get("routing") else ROUNDED


def pauses_above(job: Mapping[str, Any]) -> float | None:
    """The mean of a step at which the job pauses itself, far beyond what its settings promise."""
    value = _part(job, "bounds").get("max_mean_abs_delta_logprob")
    return float(value) if isinstance(value, int | float) else None


def _part(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = document.get(name)
    return part if isinstance(part, Mapping) else {}
