"""Tables for terminals: jobs, one job, and what a job changed."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from services.cli.progress import number, share
from shared.job_answers import JobStatus
from shared.statistics import LEVEL, shown_ks


def jobs_table(jobs: Sequence[JobStatus]) -> Table:
    table = Table("job", "state", "step", "version", "created", box=None, header_style="dim")
    for job in jobs:
        created = _clock(job.created_at_s)
        table.add_row(job.job_id, _state(job), _steps(job), str(job.policy_version), created)
    return table


def job_table(job: JobStatus) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    rows = {
        "job": job.job_id,
        "state": _state(job),
        "step": _steps(job),
        "version": str(job.policy_version),
        **{name.replace("_", " "): number(value) for name, value in job.last.items()},
        **{f"groups {name.replace('_', ' ')}": _count(num) for name, num in job.counts.items()},
    }
    for name, text in rows.items():
        table.add_row(name, text)
    if job.doing:
        table.add_row("now", Text(job.doing))
    if job.error:
        table.add_row("error", Text(job.error, style="red"))
    for warning in job.warnings:
        table.add_row("warning", Text(warning, style="yellow"))
    return table


def _state(job: JobStatus) -> str:
    return f"{job.state}, asked to {job.wish}" if job.wish else job.state


def before_after_table(summary: Mapping[str, Any]) -> Table | None:
    """pass@k of the first and the last evaluated version; None with fewer than two."""
    evaluations = summary["evaluations"]
    if len(evaluations) < 2:
        return None
    before, after = evaluations[0], evaluations[-1]
    table = Table(
        "",
        f"version {before['policy_version']}",
        f"version {after['policy_version']}",
        title=f"{after['suite']}: {after['num_problems']} problems, "
        f"{after['samples_per_problem']} samples each",
    )
    both = before["pass_at_k"].keys() & after["pass_at_k"].keys()
    shown = map(str, shown_ks(min(before["samples_per_problem"], after["samples_per_problem"])))
    for k in (k for k in shown if k in both):
        table.add_row(f"pass@{k}", _estimate(before, k), _estimate(after, k))
    table.add_row("truncated", share(before["truncated_share"]), share(after["truncated_share"]))
    change = summary["before_after"]
    if change is not None:
        table.add_section()
        mean, low, high = (_signed(change[name]) for name in ("difference", "low", "high"))
        table.add_row("pass@1, paired difference", "", f"{mean} [{low}, {high}]")
    return table


def verdict(summary: Mapping[str, Any]) -> str:
    """The change of pass@1 in words, claimed only by the sign-flip test."""
    change = summary["before_after"]
    if change is None:
        return "No two evaluations can be compared."
    told = f"sign-flip test of the paired differences, p = {number(change['p_value'])}"
    if change["p_value"] > LEVEL:
        return f"No change of pass@1 is shown ({told}, above {LEVEL:g})."
    return f"pass@1 {'rose' if change['difference'] > 0 else 'fell'} ({told})."


def _estimate(evaluation: Mapping[str, Any], k: str) -> str:
    interval = evaluation["pass_at_k_ci"].get(k)
    bounds = f" [{share(interval[0])}, {share(interval[1])}]" if interval else ""
    return f"{share(evaluation['pass_at_k'][k])}{bounds}"


def _signed(value: float | None) -> str:
    """A bound is None where one problem alone has none."""
    return "–" if value is None else f"{value:+.3f}"


def _steps(job: JobStatus) -> str:
    return f"{job.step}/{job.steps}"


def _count(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {num}" for name, num in value.items()) or "0"
    return str(value)


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
