"""A GPU run's figures: from its folder into one JSON file, from that into a table.

`python -m benchmarks.gpu_run read RUN --out FILE [--gpus gpu.csv [--gpu N...]] [--window FROM TO]`
keeps what docs/gpu-run.md tells; `python -m benchmarks.gpu_run table FILE...` sums it up, a column
for each run; `benchmarks.gpu_run_figures` draws it. Seconds count from the job's start; `gpu.csv`
is nvidia-smi's (timestamp in UTC, index, MiB used, % busy).
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_timeline import (
    GpuRows,
    gpu_rows,
    in_bins,
    online_steps,
    sampler_shares,
    window_of,
)
from services.trainer.report.events import EVENTS_FILE, RunEvents, read_events
from shared.messages import Event

STEP = (
    *("step", "groups", "samples", "graded_samples", "tokens", "response_tokens", "loss"),
    *("grad_norm", "entropy", "reward_raw", "truncated_share", "tokens_per_s", "step_seconds"),
    *("delta_logprob_mean", "delta_logprob_p99", "delta_logprob_max", "lag_mean", "lag_max"),
    *("tis_weight_mean", "tis_truncated_share", "seconds", "sampled_tokens_per_s"),
)
UPDATE = (
    *("policy_version", "bytes", "seconds", "stage_s", "load_s", "pause_s", "restore_s"),
    *("probe_s", "resume_s", "probe_mean_abs_delta"),
)
EVALUATION = (
    *("policy_version", "num_problems", "num_samples", "pass_at_k", "pass_at_k_ci"),
    *("truncated_share", "response_tokens_mean", "seconds"),
)
JOB = ("name", "seed", "steps", "warm_up", "sampling", "algorithm", "actor", "rollout", "update")
LOOKS_S = 0.9  # SGLang's pause looks a second later whether what it cut short has ended
PREFLIGHT = ("passed", "memory", "parity", "seconds")

Run = Mapping[str, Any]


def read(
    run: Path, *, gpus: GpuRows | None = None, window: tuple[float, float] | None = None
) -> dict[str, Any]:
    """`gpus` are on the clock of the events; `window`, in seconds of the job, is kept whole."""
    found = read_events(run / EVENTS_FILE)
    began_s = found.events[0].at_s
    steps = [_fields(event, STEP, began_s) for event in found.named("step")]
    for kept, event in zip(steps, found.named("step"), strict=True):
        kept["supervised"] = bool(event.fields.get("supervised"))
    kept = {
        "job": {name: found.named("job_started")[0].fields["job"].get(name) for name in JOB},
        "steps": steps,
        "updates": [_fields(e, UPDATE, began_s) for e in found.named("update_committed")],
        "evaluations": [_fields(e, EVALUATION, began_s) for e in found.named("eval_finished")],
        "preflight": [_fields(e, PREFLIGHT, began_s) for e in found.named("preflight_finished")],
        "groups_sampled": len(found.named("group_sampled")),
        "groups_dropped": len(found.named("group_dropped")),
        "group_seconds": {
            "sampled": _mean_seconds(found, "group_sampled"),
            "graded": _mean_seconds(found, "group_graded"),
        },
        "ended_at_s": round(found.events[-1].at_s - began_s, 1),
        "finished": bool(found.named("job_finished")),
        "error": next((e.fields["error"] for e in found.named("job_finished")), None),
        "sampler": sampler_shares(found) if online_steps(found) else {},
    }
    if gpus is not None:
        kept["gpus"] = in_bins(gpus, began_s, found.events[-1].at_s)
    if window is not None:
        kept["window"] = window_of(found, gpus or {}, began_s, window)
    return kept


def _fields(event: Event, names: Sequence[str], began_s: float) -> dict[str, Any]:
    kept = {name: event.fields[name] for name in names if event.fields.get(name) is not None}
    return {"at_s": round(event.at_s - began_s, 2), **_rounded(kept)}


def _rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _mean_seconds(found: RunEvents, name: str) -> float:
    took = [event.fields["seconds"] for event in found.named(name)]
    return round(float(np.mean(took)), 4) if took else 0.0


def online(run: Run) -> list[dict[str, Any]]:
    """The steps that trained on samples."""
    return [one for one in run["steps"] if not one["supervised"]]


def values(steps: Sequence[Run], name: str) -> np.ndarray:
    return np.array([one[name] for one in steps])


def probes(run: Run) -> list[dict[str, Any]]:
    """Updates with a probe, which all but a run's first have."""
    return [one for one in run["updates"] if "probe_mean_abs_delta" in one]


def fit(steps: Sequence[Run], name: str) -> tuple[float, float, float]:
    """Level at the first step, slope a step, and the slope's standard error."""
    x, y = values(steps, "step").astype(float), values(steps, name)
    slope, level = np.polyfit(x - x[0], y, 1)
    left = y - level - slope * (x - x[0])
    spread = float(((x - x.mean()) ** 2).sum())
    error = float(np.sqrt((left**2).sum() / max(1, len(x) - 2) / spread)) if spread else 0.0
    return float(level), float(slope), error


def phases(step: Run, update: Run) -> dict[str, float]:
    """Seconds of a step and of the update that it made, which runs while the trainer goes on."""
    took = step["seconds"]
    return {
        "wait for groups": took["wait"],
        "train": took["forward_backward"] + took["optimizer"] + took["pack"],
        "export and quantise": took["export"],
        "stage": update["stage_s"],
        "prepare": update["load_s"],
        "pause: load": update["restore_s"],
        "pause: rest": update["pause_s"] - update["restore_s"],
    }


def phase_rows(run: Run) -> tuple[np.ndarray, list[dict[str, float]]]:
    """Steps whose update was committed, and their phases."""
    made = {one["policy_version"]: one for one in run["updates"]}
    pairs = [(one["step"], phases(one, made[one["step"]])) for one in online(run)
             if one["step"] in made]  # fmt: skip
    return np.array([step for step, _ in pairs]), [row for _, row in pairs]


def _span(found: np.ndarray, digits: int = 2) -> str:
    """Median, and the 10 and 90 % quantiles."""
    low, middle, high = np.quantile(found, [0.1, 0.5, 0.9])
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _slope(run: Run, name: str, *, most: int | None = None) -> str:
    _, slope, error = fit(online(run)[:most], name)
    return f"{slope:+.1e} ± {2 * error:.1e}"


def _slope_of_probe(run: Run) -> str:
    probed = [one | {"step": one["policy_version"]} for one in probes(run)]
    _, slope, error = fit(probed, "probe_mean_abs_delta")
    return f"{slope:+.1e} ± {2 * error:.1e}"


def _first_and_last(name: str) -> Callable[[Run], str]:
    return lambda run: " to ".join(
        f"{values(part, name).mean():.3f}" for part in (online(run)[:10], online(run)[-10:])
    )


def _pass_at(run: Run, which: int) -> str:
    if not run["evaluations"]:
        return "–"
    found = run["evaluations"][which]
    return " / ".join(f"{found['pass_at_k'][k]:.3f}" for k in ("1", "2", "4", "8"))


def _per_update(run: Run, name: str) -> np.ndarray:
    return values([one for one in run["updates"] if name in one], name)


def steps_per_s(steps: Sequence[Run]) -> float:
    """Without the seconds of checkpoints."""
    saving_s = sum(one["seconds"].get("checkpoint", 0.0) for one in steps[1:])
    return float((len(steps) - 1) / (steps[-1]["at_s"] - steps[0]["at_s"] - saving_s))


def _updating(run: Run) -> str:
    """Share of the time between the first and the last step's end, without checkpoints."""
    steps = online(run)
    begins_s, ends_s = steps[0]["at_s"], steps[-1]["at_s"]
    within = [one["seconds"] for one in run["updates"] if begins_s < one["at_s"] <= ends_s]
    return f"{sum(within) * steps_per_s(steps) / (len(steps) - 1):.2f}"


def _sampler(name: str) -> Callable[[Run], str]:
    return lambda run: f"{run['sampler'][name]:.2f}"


def _graded_per_step(run: Run) -> str:
    steps = online(run)
    group = steps[0]["samples"] / steps[0]["groups"]
    return _span(values(steps, "graded_samples") / group, 0)


def _phase(name: str) -> Callable[[Run], str]:
    return lambda run: _span(np.array([row[name] for row in phase_rows(run)[1]]))


def short_steps(run: Run) -> tuple[list[Any], list[Any]]:
    """Steps that trained some groups of the newest version, having too few older ones; others.

    Without the first step, which has no older version.
    """
    steps = online(run)[1:]
    return [one for one in steps if one["lag_mean"] < 1], [
        one for one in steps if one["lag_mean"] == 1
    ]


def _short(run: Run) -> str:
    short, rest = short_steps(run)
    return f"{len(short)} of {len(short) + len(rest)}"


def _lacked(run: Run) -> str:
    short, _ = short_steps(run)
    return f"{np.median((1 - values(short, 'lag_mean')) * values(short, 'groups')):.0f}"


def _waits(run: Run) -> str:
    return " and ".join(
        f"{np.mean([one['seconds']['wait'] for one in part]):.1f}" if part else "–"
        for part in short_steps(run)
    )


def _rate(first: int, last: int) -> Callable[[Run], str]:
    """Of these GRPO steps, counted from 1; the first update of a run takes 4 to 14 s."""

    def rate(run: Run) -> str:
        steps = online(run)[first - 1 : last]
        return f"{steps_per_s(steps):.3f}" if len(steps) > last - first else "–"

    return rate


def _looked_twice(run: Run) -> str:
    """Updates whose pause was a second longer than their load and probe."""
    twice = [one["pause_s"] - one["restore_s"] - one["probe_s"] > LOOKS_S for one in probes(run)]
    return f"{sum(twice)} of {len(twice)}"


ROWS: dict[str, Callable[[Run], str]] = {
    "steps on samples": lambda run: str(len(online(run))),
    "seconds of the job": lambda run: f"{run['ended_at_s']:.0f}",
    "mean of abs(Δ log p)": lambda run: _span(values(online(run), "delta_logprob_mean"), 4),
    "- slope a step, ± 2 standard errors": lambda run: _slope(run, "delta_logprob_mean"),
    "- of the first 30 steps": lambda run: _slope(run, "delta_logprob_mean", most=30),
    "- at most in a step": lambda run: f"{values(online(run), 'delta_logprob_mean').max():.4f}",
    "p99 of abs(Δ log p)": lambda run: _span(values(online(run), "delta_logprob_p99"), 3),
    "probe after the update": lambda run: _span(_per_update(run, "probe_mean_abs_delta"), 4),
    "- slope a version": _slope_of_probe,
    "- at most": lambda run: f"{_per_update(run, 'probe_mean_abs_delta').max():.4f}",
    "mean lag": lambda run: _span(values(online(run), "lag_mean")),
    "TIS weights cut, share": lambda run: (
        f"{values(online(run), 'tis_truncated_share').mean():.2g}"
    ),
    "norm of the gradient, first and last ten steps": _first_and_last("grad_norm"),
    "entropy": _first_and_last("entropy"),
    "reward": _first_and_last("reward_raw"),
    "- slope a step, ± 2 standard errors ": lambda run: _slope(run, "reward_raw"),
    "pass@1/2/4/8 at first": lambda run: _pass_at(run, 0),
    "pass@1/2/4/8 at last": lambda run: _pass_at(run, -1),
    "truncated of evaluated answers, at most": lambda run: (
        f"{values(run['evaluations'], 'truncated_share').max():.3f}"
    ),
    "groups graded for 32 that train": _graded_per_step,
    "seconds a step": lambda run: _span(values(online(run), "step_seconds")),
    "steps a second": lambda run: f"{steps_per_s(online(run)):.3f}",
    "- of steps 3 to 30": _rate(3, 30),
    "- of steps 3 to 60": _rate(3, 60),
    "steps with groups of the newest version": _short,
    "- of 32, median": _lacked,
    "- mean wait for groups, theirs and others', s": _waits,
    **{
        f"- {name}": _phase(name)
        for name in ("wait for groups", "train", "export and quantise", "stage", "prepare")
    },
    "- pause": lambda run: _span(_per_update(run, "pause_s")),
    "- - of it the server's load": _phase("pause: load"),
    "- - updates whose pause looked twice": _looked_twice,
    "whole update": lambda run: _span(_per_update(run, "seconds")),
    "- share of the time with one under way": _updating,
    "whole update, GB/s": lambda run: _span(
        _per_update(run, "bytes") / 1e9 / _per_update(run, "seconds")
    ),
    "load, GB/s": lambda run: _span(
        _per_update(run, "bytes") / 1e9 / _per_update(run, "restore_s")
    ),
    **{
        f"sampler: {name}, share of the time": _sampler(name)
        for name in (
            *("sampling", "paused", "evaluating"),
            *("nothing to sample, update in preparation", "nothing to sample, no update"),
        )
    },
}


def table(runs: Mapping[str, Run]) -> str:
    """Median (10 to 90 % of the steps), unless said otherwise."""
    lines = [f"| | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(map(row, runs.values()))} |" for name, row in ROWS.items()]
    return "\n".join(lines) + "\n"


def load(files: Sequence[Path]) -> dict[str, Run]:
    """By the files' names."""
    return {_name(file): json.loads(file.read_text()) for file in files}


def _name(file: Path) -> str:
    words = file.stem.removeprefix("gpu_run_").replace("_", " ")
    return words.replace("gpu", "GPU").replace("GPU seed", "GPU, seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    reads = actions.add_parser("read")
    reads.add_argument("run", type=Path)
    reads.add_argument("--gpus", type=Path)
    reads.add_argument("--gpu", type=int, nargs="+", help="of gpus.csv; all, if not given")
    reads.add_argument("--window", type=float, nargs=2)
    reads.add_argument("--out", type=Path, required=True)
    sums = actions.add_parser("table")
    sums.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    if given.action == "read":
        gpus = gpu_rows(given.gpus, given.gpu) if given.gpus else None
        kept = read(given.run, gpus=gpus, window=given.window and tuple(given.window))
        given.out.write_text(json.dumps(kept) + "\n")
    else:
        sys.stdout.write(table(load(given.results)))


if __name__ == "__main__":
    main()
