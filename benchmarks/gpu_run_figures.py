"""Plots of GPU runs: `python -m benchmarks.gpu_run_figures FILE... [--changed FILE...]`.

Each FILE was made by `benchmarks.gpu_run read`; the first is the run whose seconds and memory are
drawn, the others go beside it. With `--changed` one more figure has these runs, the first of them
the one that the others differ from by a setting or a fault.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.gpu_run import Run, fit, load, online, phase_rows, probes, values
from benchmarks.gpu_timeline_figure import timeline_figure

FRESH = 0.3  # mean lag of a step most of whose samples are of the version that it trains
PUBLISHED = 0.09  # mean |delta log p| of the published experiment
BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#f59e0b", "#059669", "#dc2626", "#64748b"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#7c3aed")


def draw(runs: Mapping[str, Run], changed: Mapping[str, Run], folder: Path) -> None:
    first_name, first = next(iter(runs.items()))
    figure, (drift, probe) = _figure(2)
    _drift(drift, runs)
    _lag_and_probe(probe, runs)
    _save(figure, folder / "gpu_run_drift.png")
    figure, (reward, passes, of_first) = _figure(3)
    _reward(reward, runs)
    _passes(passes, runs)
    _passes_of(of_first, first_name, first)
    _save(figure, folder / "gpu_run_reward.png")
    figure, (phases, memory) = _figure(2)
    _phases(phases, first)
    _memory(memory, first)
    _save(figure, folder / "gpu_run_seconds.png")
    for name, run in runs.items():
        if "window" in run:
            kept = (
                folder / f"gpu_run_timeline_{name.lower().replace(', ', '_').replace(' ', '_')}.png"
            )
            _save(timeline_figure(run["window"]), kept)
    if changed:
        _save(_changed(changed), folder / "gpu_run_changed.png")


def _changed(runs: Mapping[str, Run]) -> Figure:
    """As many steps as the others have of the first."""
    most = max(len(online(run)) for run in list(runs.values())[1:])
    figure, (drift, probe) = _figure(2, rows=2)
    for (name, run), colour in zip(runs.items(), (GREY, BLUE, GREEN, RED, ORANGE), strict=False):
        steps = online(run)[:most]
        begins = steps[0]["step"]
        at = np.arange(1, len(steps) + 1)
        drift.plot(at, values(steps, "delta_logprob_mean"), color=colour, label=name)
        probed = [one for one in probes(run) if one["policy_version"] < begins + most]
        versions = values(probed, "policy_version") - begins + 1
        probe.plot(versions, values(probed, "probe_mean_abs_delta"), color=colour)
    drift.set(ylabel="mean |Δ log p| of the step", ylim=(0, 0.018))
    drift.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=len(runs))
    probe.set(xlabel="GRPO step", ylabel="probe of its version", ylim=(0, 0.009))
    return figure


def _drift(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        steps = online(run)
        at = np.arange(1, len(steps) + 1)
        axes.semilogy(at, values(steps, "delta_logprob_p99"), ":", color=colour, alpha=0.7)
        level, slope, error = fit(steps, "delta_logprob_mean")
        label = f"{name}, mean: {level:.4f} {slope:+.1e} (± {2 * error:.1e}) a step"
        axes.semilogy(at, values(steps, "delta_logprob_mean"), color=colour, label=label)
        axes.semilogy(at, level + slope * (at - 1), "--", color=colour, linewidth=1)
    axes.plot([], [], ":", color=GREY, label="p99 of the step's tokens")
    axes.axhline(PUBLISHED, color=GREY, linestyle="-.", label=f"published mean, {PUBLISHED}")
    axes.set(xlabel="GRPO step", ylabel="|Δ log p| of sampler and trainer", ylim=(1e-3, 3))
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _lag_and_probe(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        probed, steps = probes(run), online(run)
        begins = steps[0]["step"]
        at = values(probed, "policy_version") - begins + 1
        axes.semilogy(at, values(probed, "probe_mean_abs_delta"), color=colour, label=name)
        fresh = [one for one in steps if one["lag_mean"] < FRESH]
        mean = values(fresh, "delta_logprob_mean")
        axes.scatter(values(fresh, "step") - begins + 1, mean, color=colour, s=14, zorder=3)
    axes.scatter([], [], c=GREY, s=14, label=f"samples of a step with mean lag below {FRESH}")
    axes.set(xlabel="GRPO step", ylabel="probe of the step's version", ylim=(1e-4, 0.3))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def _reward(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        steps = online(run)
        at = np.arange(1, len(steps) + 1)
        level, slope, error = fit(steps, "reward_raw")
        axes.plot(at, values(steps, "reward_raw"), color=colour, alpha=0.55, linewidth=1)
        label = f"{name}: {level:.3f} {slope:+.2e} (± {2 * error:.1e}) a step"
        axes.plot(at, level + slope * (at - 1), color=colour, label=label)
    axes.set(xlabel="GRPO step", ylabel="reward of all graded samples", ylim=(0, 1.2))
    axes.set_yticks(np.arange(0, 1.1, 0.2))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _passes(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The first try, with its interval."""
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        found = run["evaluations"]
        at = _evaluated_at(run)
        low, high = np.array([one["pass_at_k_ci"]["1"] for one in found]).T
        passed = [one["pass_at_k"]["1"] for one in found]
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(at, passed, color=colour, marker=".", label=name)
    axes.set(xlabel="GRPO steps before", ylabel="pass@1 of held-out problems", ylim=(0, 1.3))
    axes.set_yticks(np.arange(0, 1.1, 0.2))
    axes.legend(frameon=False, fontsize=8, loc="upper left", title="with 95 % intervals")


def _passes_of(axes: Axes, name: str, run: Run) -> None:
    found, at = run["evaluations"], _evaluated_at(run)
    for k, colour in zip(("1", "2", "4", "8"), COLOURS, strict=False):
        axes.plot(at, [one["pass_at_k"][k] for one in found], color=colour, marker=".", label=k)
    axes.plot(at, values(found, "truncated_share"), color=GREY, label="truncated")
    axes.set(xlabel="GRPO steps before", ylabel=f"{name}: pass@k, share truncated", ylim=(0, 1.3))
    axes.set_yticks(np.arange(0, 1.1, 0.2))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3, title="k")


def _evaluated_at(run: Run) -> np.ndarray:
    return values(run["evaluations"], "policy_version") - online(run)[0]["step"] + 1


def _phases(axes: Axes, run: Run) -> None:
    steps, rows = phase_rows(run)
    colours = ("#cbd5e1", BLUE, "#60a5fa", "#a7f3d0", "#34d399", ORANGE, RED)
    begins = {"trainer": np.zeros(len(rows)), "sampler": np.zeros(len(rows))}
    at = steps - online(run)[0]["step"] + 1
    for number, (name, colour) in enumerate(zip(rows[0], colours, strict=True)):
        side, sign = ("trainer", 1) if number < 3 else ("sampler", -1)
        found = np.array([row[name] for row in rows])
        axes.bar(at, sign * found, 1.0, sign * begins[side], color=colour, label=name, linewidth=0)
        begins[side] += found
    top = float(np.quantile(np.maximum(begins["trainer"], begins["sampler"]), 0.98)) * 1.9
    axes.axhline(0, color="#0f172a", linewidth=0.8)
    axes.set(xlabel="GRPO step", ylabel="seconds; down: its update", ylim=(-0.5 * top, top))
    axes.legend(frameon=False, fontsize=7.5, loc="upper right", ncols=2)


def _memory(axes: Axes, run: Run) -> None:
    gpus = {index: rows for index, rows in run.get("gpus", {}).items() if index != "bin_s"}
    for (index, rows), colour in zip(gpus.items(), COLOURS, strict=False):
        seconds, used, busy = np.array(rows).T
        axes.plot(seconds, used / 1024, color=colour, linewidth=1.8, label=f"GPU {index}, GiB used")
        axes.plot(seconds, busy, color=colour, linewidth=0.6, alpha=0.5)
    axes.plot([], [], color=GREY, linewidth=0.6, label="thin: busy, %")
    axes.set(xlabel="seconds of the job", ylabel="GiB used; busy, %", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)


def _figure(num_panels: int, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Panels side by side, or all below each other."""
    size = (5.2 * num_panels, 4.0) if rows == 1 else (9.0, 2.6 * rows)
    figure = Figure(figsize=size, dpi=120 if num_panels < 3 else 100)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, num_panels // rows, sharex=rows > 1))
    for axes in panels:
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--changed", type=Path, nargs="+", default=[])
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    given = parser.parse_args()
    draw(load(given.results), load(given.changed), given.figures)


if __name__ == "__main__":
    main()
