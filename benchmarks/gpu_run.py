"""A GPU run's figures: from its folder into one JSON file, from that into plots.

`python -m benchmarks.gpu_run read RUN --memory gpu.csv --out FILE` keeps what docs/gpu-run.md
tells; `python -m benchmarks.gpu_run draw FILE --figures FOLDER` draws it. Seconds count from the
job's start; those of `gpu.csv` (seconds, MiB used, % busy) from the start of its own clock.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from services.trainer.report.events import EVENTS_FILE, RunEvents, read_events
from shared.messages import Event

PUBLISHED = 0.09  # mean |delta log p| of the published experiment
STEP = (
    *("step", "groups", "samples", "graded_samples", "tokens", "response_tokens", "loss"),
    *("grad_norm", "entropy", "reward_raw", "truncated_share", "tokens_per_s", "step_seconds"),
    *("delta_logprob_mean", "delta_logprob_p99", "delta_logprob_max", "lag_mean", "lag_max"),
    *("tis_weight_mean", "tis_truncated_share", "seconds", "sampled_tokens_per_s"),
)
UPDATE = (
    *("policy_version", "bytes", "seconds", "stage_s", "load_s", "pause_s", "restore_s"),
    *("probe_s", "resume_s", "probe_mean_abs_delta", "effective_checksum", "is_rollback"),
)
EVALUATION = (
    *("policy_version", "num_problems", "num_samples", "pass_at_k", "pass_at_k_ci"),
    *("truncated_share", "response_tokens_mean", "seconds"),
)
JOB = ("name", "seed", "steps", "sampling", "algorithm", "actor", "rollout", "update")
PREFLIGHT = ("passed", "memory", "parity", "seconds")


def read(run: Path, memory: Path) -> dict[str, Any]:
    found = read_events(run / EVENTS_FILE)
    began_s = found.events[0].at_s
    steps = [_fields(event, STEP, began_s) for event in found.named("step")]
    for kept, event in zip(steps, found.named("step"), strict=True):
        kept["supervised"] = bool(event.fields.get("supervised"))
    with memory.open() as lines:
        rows = [[float(value) for value in row[:3]] for row in csv.reader(lines)]
    return {
        "job": {name: found.named("job_started")[0].fields["job"][name] for name in JOB},
        "steps": steps,
        "updates": [_fields(e, UPDATE, began_s) for e in found.named("update_committed")],
        "evaluations": [_fields(e, EVALUATION, began_s) for e in found.named("eval_finished")],
        "preflight": [_fields(e, PREFLIGHT, began_s) for e in found.named("preflight_finished")],
        "group_seconds": {
            "sampled": _mean_seconds(found, "group_sampled"),
            "graded": _mean_seconds(found, "group_graded"),
        },
        "last_sample_at_s": round(found.named("group_sampled")[-1].at_s - began_s, 1),
        "memory": {"columns": ["s", "MiB used", "% busy"], "rows": rows},
    }


def _fields(event: Event, names: Sequence[str], began_s: float) -> dict[str, Any]:
    kept = {name: event.fields[name] for name in names if event.fields.get(name) is not None}
    return {"at_s": round(event.at_s - began_s, 1), **kept}


def _mean_seconds(found: RunEvents, name: str) -> float:
    return float(np.mean([event.fields["seconds"] for event in found.named(name)]))


def draw(result: Mapping[str, Any], folder: Path) -> None:
    supervised = [one for one in result["steps"] if one["supervised"]]
    sampled = [one for one in result["steps"] if not one["supervised"]]
    figure, (drift, loss) = _figure("drift")
    _drift(drift, sampled, result["updates"])
    steps, losses = zip(*((one["step"], one["loss"]) for one in supervised), strict=True)
    loss.semilogy(steps, losses, color="#2563eb", linewidth=1.5)
    ticks = [0.5, 1, 2, 4, 8]
    loss.set(xlabel="step", ylabel="supervised loss, nats a token", ylim=(0.4, 10))
    loss.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    loss.minorticks_off()
    _save(figure, folder / "gpu_run_drift.png")

    figure, (phases, memory) = _figure("seconds")
    _phases(phases, sampled, result["updates"])
    seconds, used, _ = np.array(result["memory"]["rows"]).T
    memory.plot(seconds, used / 1024, color="#2563eb", linewidth=1.5)
    memory.set(xlabel="seconds of the call", ylabel="GPU memory used, GiB", ylim=(0, 140))
    _save(figure, folder / "gpu_run_seconds.png")


def _drift(axes: Axes, sampled: list[dict[str, Any]], updates: list[dict[str, Any]]) -> None:
    steps = [one["step"] for one in sampled]
    for name, colour in (("mean", "#2563eb"), ("p99", "#f59e0b")):
        values = [one[f"delta_logprob_{name}"] for one in sampled]
        axes.semilogy(steps, values, "o-", color=colour, label=f"{name} of the step's tokens")
    probed = [one for one in updates if "probe_mean_abs_delta" in one]
    axes.semilogy(
        [one["policy_version"] for one in probed],
        [one["probe_mean_abs_delta"] for one in probed],
        "s--",
        color="#059669",
        label="mean of the probe after the update",
    )
    axes.axhline(PUBLISHED, color="#64748b", linestyle=":", label=f"published mean, {PUBLISHED}")
    axes.set(xlabel="step", ylabel="|Δ log p|", xticks=steps, ylim=(3e-3, 2))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def phases(step: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step and of the update that it made; the update runs while the trainer waits."""
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


def _phases(axes: Axes, sampled: list[dict[str, Any]], updates: list[dict[str, Any]]) -> None:
    made = {one["policy_version"]: one for one in updates}
    rows = [phases(step, made[step["step"]]) for step in sampled]
    colours = ("#cbd5e1", "#2563eb", "#60a5fa", "#a7f3d0", "#34d399", "#f59e0b", "#dc2626")
    begins = {"trainer": np.zeros(len(rows)), "sampler": np.zeros(len(rows))}
    steps = np.array([one["step"] for one in sampled])
    for number, (name, colour) in enumerate(zip(rows[0], colours, strict=True)):
        side, at = ("trainer", steps - 0.2) if number < 3 else ("sampler", steps + 0.2)
        values = np.array([row[name] for row in rows])
        axes.bar(at, values, 0.36, begins[side], color=colour, label=name)
        begins[side] += values
    axes.set(xlabel="step (left: trainer, right: its update)", ylabel="seconds", xticks=steps)
    axes.set_ylim(0, 62)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _figure(title: str) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(10.4, 4.0), dpi=120, label=title)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, (left, right)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    reads = actions.add_parser("read")
    reads.add_argument("run", type=Path)
    reads.add_argument("--memory", type=Path, required=True)
    reads.add_argument("--out", type=Path, required=True)
    draws = actions.add_parser("draw")
    draws.add_argument("result", type=Path)
    draws.add_argument("--figures", type=Path, default=Path("docs/figures"))
    given = parser.parse_args()
    if given.action == "read":
        given.out.write_text(json.dumps(read(given.run, given.memory), indent=1) + "\n")
    else:
        draw(json.loads(given.result.read_text()), given.figures)


if __name__ == "__main__":
    main()
