"""The numbers of a run: what summary.json holds and the report shows.

Each is computed here from the run's events; a number that the events cannot give is None.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.trainer.report.curves import Curve, Curves
from services.trainer.report.drift import Bound, drift_bound, pauses_above
from services.trainer.report.evaluations import (
    Comparison,
    Evaluation,
    compare_to_first,
    failed_evaluations,
)
from services.trainer.report.events import RunEvents, dropped_by_reason
from shared.job_sampling import truncation_warning
from shared.statistics import Interval, linear_fit, mean_interval


@dataclass(frozen=True, slots=True)
class Slope:
    """Change per step with its 95 % interval."""

    per_step: float
    low: float
    high: float
    num_steps: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Reward:
    """Online reward; first and last are means of the steps' values over a third of the run at
    either end, with 95 % intervals that take steps as independent."""

    first: Interval
    last: Interval
    mean: float
    slope: Slope


@dataclass(frozen=True, slots=True)
class DeltaLogprob:
    """|log p of the sampler - log p of the trainer| of the sampled tokens.

    mean and p99 are means of the steps' values weighted by response tokens; p99_worst_step and max
    are the largest of any step; largest_jump is the largest rise of the mean from one step to the
    next, so after one weight update. `bound` is what the job's settings promise of a step's mean;
    above `pauses_above` the job pauses.
    """

    mean: float
    p99: float
    p99_worst_step: float
    max: float
    largest_jump: float
    slope: Slope
    bound: float
    bound_why: str
    steps_above: int
    pauses_above: float | None


@dataclass(frozen=True, slots=True)
class Groups:
    sampled: int
    graded: int
    trained: int
    dropped: dict[str, int]
    duplicates_refused: int
    prompts_skipped: int


@dataclass(frozen=True, slots=True)
class Updates:
    """Weight updates: versions published, and transactions of single servers."""

    versions_published: int
    last_version: int | None
    committed: int
    failed: int
    seconds_mean: float
    pause_s_mean: float
    bytes_mean: float
    pulled_share_mean: float
    probe_mean_abs_delta_worst: float


@dataclass(frozen=True, slots=True)
class Summary:
    job_id: str
    name: str
    state: str
    error: str | None
    seed: int | None
    steps: int
    steps_planned: int | None
    wall_s: float
    groups: Groups
    samples_trained: int
    tokens_trained: int
    response_tokens_sampled: int
    route_bytes: int  # of the sampler's choices, compressed, that came with trained groups
    outcomes: dict[str, int]
    reward_raw: Reward
    reward_trained: Reward
    delta_logprob: DeltaLogprob
    lag_mean: float
    lag_max: float
    evaluations: list[Evaluation]
    before_after: Comparison | None
    seconds_per_phase: dict[str, float]
    step_seconds_mean: float
    updates: Updates
    restarts: dict[str, int]
    preflight: dict[str, Any] | None
    attribution: list[dict[str, Any]]
    warnings: list[str]

    def document(self) -> dict[str, Any]:
        """Plain JSON values; nan, which JSON lacks, becomes None."""
        plain = _without_nan(asdict(self))
        assert isinstance(plain, dict)
        return plain


def summarise(run: RunEvents, curves: Curves, evaluations: list[Evaluation]) -> Summary:
    job = job_document(run)
    state, error = _state(run)
    return Summary(
        job_id=run.events[0].job_id if run.events else "",
        name=str(job.get("name", "")),
        state=state,
        error=error,
        seed=job.get("seed"),
        steps=len(curves),
        steps_planned=job.get("steps"),
        wall_s=run.events[-1].at_s - run.events[0].at_s if run.events else 0.0,
        groups=_groups(run, curves),
        samples_trained=int(np.nansum(curves.samples)),
        tokens_trained=int(np.nansum(curves.tokens)),
        response_tokens_sampled=_total(run, "group_sampled", "tokens"),
        route_bytes=int(np.nansum(curves.route_bytes)),
        outcomes=_outcomes(run),
        reward_raw=_reward(curves, curves.reward_raw),
        reward_trained=_reward(curves, curves.reward_trained),
        delta_logprob=_delta_logprob(curves, drift_bound(job), pauses_above(job)),
        lag_mean=_mean(curves.lag_mean),
        lag_max=_max(curves.lag_max),
        evaluations=evaluations,
        before_after=compare_to_first(evaluations),
        seconds_per_phase={name: float(values.sum()) for name, values in curves.phases.items()},
        step_seconds_mean=_mean(curves.step_seconds),
        updates=_updates(run),
        restarts=_restarts(run),
        preflight=next((e.fields for e in reversed(run.named("preflight_finished"))), None),
        attribution=[event.fields for event in run.named("drift_attributed")],
        warnings=_warnings(run, job, curves),
    )


def job_document(run: RunEvents) -> dict[str, Any]:
    started = run.named("job_started")
    return dict(started[0].fields.get("job") or {}) if started else {}


def _state(run: RunEvents) -> tuple[str, str | None]:
    """A job that was started again after its end (a pause, say) has not ended."""
    turns = [event for event in run.events if event.name in ("job_started", "job_finished")]
    if not turns or turns[-1].name == "job_started":
        return "unfinished", None
    fields = turns[-1].fields
    return str(fields.get("state", "finished")), fields.get("error")


def _groups(run: RunEvents, curves: Curves) -> Groups:
    return Groups(
        sampled=_distinct_groups(run, "group_sampled"),
        graded=_distinct_groups(run, "group_graded"),
        trained=int(np.nansum(curves.groups)),
        dropped=dropped_by_reason(run),
        duplicates_refused=len(run.named("duplicate_refused")),
        prompts_skipped=len({event.fields.get("row") for event in run.named("prompt_skipped")}),
    )


def _distinct_groups(run: RunEvents, name: str) -> int:
    return len({event.fields.get("group_id") for event in run.named(name)})


def _total(run: RunEvents, name: str, field: str) -> int:
    return sum(int(event.fields.get(field) or 0) for event in run.named(name))


def _outcomes(run: RunEvents) -> dict[str, int]:
    totals: dict[str, int] = {}
    for event in run.named("group_graded"):
        for kind, num in dict(event.fields.get("outcomes") or {}).items():
            totals[kind] = totals.get(kind, 0) + int(num)
    return totals


def _reward(curves: Curves, values: Curve) -> Reward:
    known = _finite(values)
    third = math.ceil(known.size / 3)
    return Reward(
        first=mean_interval(known[:third]),
        last=mean_interval(known[known.size - third :]),
        mean=_mean(values),
        slope=_slope(curves, values),
    )


def _delta_logprob(curves: Curves, bound: Bound, pauses: float | None) -> DeltaLogprob:
    rises = np.diff(curves.delta_mean)
    return DeltaLogprob(
        mean=_weighted_mean(curves.delta_mean, curves.response_tokens),
        p99=_weighted_mean(curves.delta_p99, curves.response_tokens),
        p99_worst_step=_max(curves.delta_p99),
        max=_max(curves.delta_max),
        largest_jump=_max(rises),
        slope=_slope(curves, curves.delta_mean),
        bound=bound.value,
        bound_why=bound.why,
        steps_above=int((curves.delta_mean >= bound.value).sum()),
        pauses_above=pauses,
    )


def _slope(curves: Curves, values: Curve) -> Slope:
    fit = linear_fit(values, curves.step)
    return Slope(fit.slope, fit.low, fit.high, fit.num)


def _updates(run: RunEvents) -> Updates:
    versions = {int(event.fields["policy_version"]) for event in run.named("weights_published")}
    committed = [event.fields for event in run.named("update_committed")]
    return Updates(
        versions_published=len(versions),
        last_version=max(versions, default=None),
        committed=len(committed),
        failed=len(run.named("update_failed")),
        seconds_mean=_mean(_field(committed, "seconds")),
        pause_s_mean=_mean(_field(committed, "pause_s")),
        bytes_mean=_mean(_field(committed, "bytes")),
        pulled_share_mean=_mean(
            _field(committed, "pulled_bytes") / np.maximum(_field(committed, "bytes"), 1)
        ),
        probe_mean_abs_delta_worst=_max(_field(committed, "probe_mean_abs_delta")),
    )


def _field(items: list[dict[str, Any]], name: str) -> Curve:
    values = [item.get(name) for item in items]
    return np.array([math.nan if value is None else float(value) for value in values])


def _restarts(run: RunEvents) -> dict[str, int]:
    """How often the job was taken up again, its ranks were restarted, steps were replayed."""
    counts = {
        "job_taken_up_again": len(run.named("job_started")) - 1,
        "ranks_restarted": len(run.named("rank_restarted")),
        "replays": len(run.named("replayed")),
    }
    return {name: num for name, num in counts.items() if num > 0}


def _warnings(run: RunEvents, job: dict[str, Any], curves: Curves) -> list[str]:
    found: list[str] = []
    if job and job.get("eval") is None:
        found.append("no eval section: the online reward alone is biased by dynamic sampling")
    sampling = job.get("sampling") or {}
    if cut := truncation_warning(sampling.get("top_p", 1.0), sampling.get("top_k", 0)):
        found.append(cut)
    if bad := int(np.nansum(curves.bad_logprobs)):
        found.append(f"{bad} unusable sampler log-probabilities were masked")
    for name, what in (
        ("update_failed", "weight updates of a server failed"),
        ("engine_not_started", "starts of a server's engine failed"),
        ("suite_failed", "further suites of evaluations failed"),
    ):
        if events := run.named(name):
            found.append(f"{len(events)} {what}; the last: {events[-1].fields.get('error')}")
    if failed := failed_evaluations(run):
        versions = ", ".join(str(event.fields.get("policy_version")) for event in failed)
        found.append(
            f"{len(failed)} evaluations failed, of version {versions}; the last: "
            f"{failed[-1].fields.get('error')}"
        )
    if events := run.named("pairs_skipped"):
        told = events[-1].fields
        found.append(
            f"{told.get('number')} warm-up pairs were skipped: their prompts have more than "
            f"{told.get('limit')} tokens"
        )
    if (version := _rolled_back_to(run)) is not None:
        found.append(
            f"the rollback to version {version} has not been ended: no step begins until it is"
        )
    if run.num_unreadable:
        found.append(f"{run.num_unreadable} of {run.num_lines} event lines could not be read")
    return found


def _rolled_back_to(run: RunEvents) -> int | None:
    told = [event for event in run.events if event.name.startswith("rollback_")]
    is_on = told and told[-1].name == "rollback_started"
    return int(told[-1].fields["policy_version"]) if is_on else None


def _finite(values: Curve) -> Curve:
    kept: Curve = values[np.isfinite(values)]
    return kept


def _mean(values: Curve) -> float:
    kept = _finite(values)
    return float(kept.mean()) if kept.size else math.nan


def _max(values: Curve) -> float:
    kept = _finite(values)
    return float(kept.max()) if kept.size else math.nan


def _weighted_mean(values: Curve, weights: Curve) -> float:
    """Weighted by response tokens where they are known, else by step."""
    known = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    if not known.any():
        return _mean(values)
    return float(np.average(values[known], weights=weights[known]))


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
