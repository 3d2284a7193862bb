"""The per-step numbers of a run as arrays, one entry a step, nan where an event has no number."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.report.events import RunEvents

PHASES = (
    "wait",
    "pack",
    "attribute",
    "logprobs",
    "forward_backward",
    "optimizer",
    "export",
    "publish",
    "checkpoint",
)

Curve = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curves:
    """Arrays of one length, in order of `step`."""

    step: Curve
    groups: Curve
    samples: Curve
    tokens: Curve
    response_tokens: Curve
    reward_raw: Curve
    reward_trained: Curve
    delta_mean: Curve
    delta_p99: Curve
    delta_max: Curve
    lag_mean: Curve
    lag_max: Curve
    truncated: Curve
    bad_logprobs: Curve
    route_bytes: Curve
    step_seconds: Curve
    tokens_per_s: Curve
    phases: dict[str, Curve]

    def __len__(self) -> int:
        return int(self.step.size)


def step_curves(run: RunEvents) -> Curves:
    """Collect the `step` events; a step told twice (a replay after a crash) counts once."""
    by_step = {int(event.fields["step"]): event.fields for event in run.named("step")}
    steps = [by_step[step] for step in sorted(by_step)]
    samples, response_mean = _curve(steps, "samples"), _curve(steps, "response_tokens_mean")
    return Curves(
        step=_curve(steps, "step"),
        groups=_curve(steps, "groups"),
        samples=samples,
        tokens=_curve(steps, "tokens"),
        response_tokens=samples * response_mean,
        reward_raw=_curve(steps, "reward_raw"),
        reward_trained=_curve(steps, "reward_trained"),
        delta_mean=_curve(steps, "delta_logprob_mean"),
        delta_p99=_curve(steps, "delta_logprob_p99"),
        delta_max=_curve(steps, "delta_logprob_max"),
        lag_mean=_curve(steps, "lag_mean"),
        lag_max=_curve(steps, "lag_max"),
        truncated=_curve(steps, "truncated_share"),
        bad_logprobs=_curve(steps, "bad_logprobs"),
        route_bytes=_curve(steps, "route_bytes"),
        step_seconds=_curve(steps, "step_seconds"),
        tokens_per_s=_curve(steps, "tokens_per_s"),
        phases=_phases(steps),
    )


def _curve(steps: list[dict[str, Any]], name: str) -> Curve:
    return np.array([_number(fields.get(name)) for fields in steps], dtype=np.float64)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _phases(steps: list[dict[str, Any]]) -> dict[str, Curve]:
    """Seconds by phase, those of PHASES first; 'other' is what the step took beyond them."""
    seconds = [dict(fields.get("seconds") or {}) for fields in steps]
    told = {name for phases in seconds for name in phases}
    names = [name for name in PHASES if name in told] + sorted(told - set(PHASES))
    curves = {name: np.nan_to_num(_curve(seconds, name)) for name in names}
    other = _curve(steps, "step_seconds") - sum(curves.values())
    if np.nansum(np.maximum(other, 0.0)) > 0:
        curves["other"] = np.nan_to_num(np.maximum(other, 0.0))
    return curves
