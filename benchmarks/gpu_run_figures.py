"""Plots of GPU runs: `python -m benchmarks.gpu_run_figures FILE... [--figures FOLDER]`.

Each FILE was made by `benchmarks.gpu_run read`; the first is the run whose seconds and memory are
drawn, all others that are long enough go beside it.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.gpu_run import Run, fit, load, online, phase_rows, values

PUBLISHED = 0.09  # mean |delta log p| of the published experiment
LONG = 20  # steps that make a curve
BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#f59e0b", "#059669", "#dc2626", "#64748b"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#7c3aed")


def draw(runs: Mapping[str, Run], folder: Path) -> None:
    long = {name: run for name, run in runs.items() if len(online(run)) >= LONG} or dict(runs)
    first = next(iter(runs.values()))
    figure, (drift, p99) = _figure("drift")
    _drift(drift, long)
    _lag_and_probe(p99, long)
    _save(figure, folder / "gpu_run_drift.png")
    figure, (reward, passes) = _figure("reward")
    _reward(reward, long)
    _passes(passes, long)
    _save(figure, folder / "gpu_run_reward.png")
    figure, (phases, memory) = _figure("seconds")
    _phases(phases, first)
    _memory(memory, first)
    _save(figure, folder / "gpu_run_seconds.png")


def _drift(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        steps = online(run)
        at = np.arange(1, len(steps) + 1)
        axes.semilogy(at, values(steps, "delta_logprob_p99"), ":", color=colour, alpha=0.7)
        level, slope, error = fit(steps, "delta_logprob_mean")
        label = f"{name}, mean: {level:.4f} {slope:+.1e} (± {2 * error:.0e}) a step"
        axes.semilogy(at, values(steps, "delta_logprob_mean"), color=colour, label=label)
        axes.semilogy(at, level + slope * (at - 1), "--", color=colour, linewidth=1)
    axes.plot([], [], ":", color=GREY, label="p99 of the step's tokens")
    axes.axhline(PUBLISHED, color=GREY, linestyle="-.", label=f"published mean, {PUBLISHED}")
    axes.set(xlabel="GRPO step", ylabel="|Δ log p| of sampler and trainer", ylim=(1e-3, 3))
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _lag_and_probe(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        probed = [one for one in run["updates"] if "probe_mean_abs_delta" in one]
        steps = online(run)
        at = values(probed, "policy_version") - steps[0]["step"] + 1
        axes.plot(
            at, values(probed, "probe_mean_abs_delta"), color=colour, label=f"{name}, probe of step"
        )
        axes.scatter(
            np.arange(1, len(steps) + 1),
            values(steps, "delta_logprob_mean"),
            c=values(steps, "lag_mean"),
            s=14,
            cmap="viridis",
            vmin=0,
            vmax=1,
            zorder=3,
        )
    axes.scatter([], [], c=GREY, s=14, label="mean of the step; violet: no lag, yellow: lag 1")
    axes.set(xlabel="GRPO step", ylabel="mean |Δ log p|", ylim=(0, 0.03))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _reward(axes: Axes, runs: Mapping[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        steps = online(run)
        at = np.arange(1, len(steps) + 1)
        level, slope, error = fit(steps, "reward_raw")
        axes.plot(at, values(steps, "reward_raw"), color=colour, alpha=0.55, linewidth=1)
        label = f"{name}: {level:.3f} {slope:+.2e} (± {2 * error:.0e}) a step"
        axes.plot(at, level + slope * (at - 1), color=colour, label=label)
    axes.set(xlabel="GRPO step", ylabel="reward of all graded samples", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _passes(axes: Axes, runs: Mapping[str, Run]) -> None:
    styles = {"1": "-", "2": "--", "4": "-.", "8": ":"}
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        found = run["evaluations"]
        if not found:
            continue
        at = values(found, "policy_version") - online(run)[0]["step"] + 1
        for k, style in styles.items():
            label = f"{name}, pass@k" if k == "1" else None
            passed = [one["pass_at_k"][k] for one in found]
            axes.plot(at, passed, style, color=colour, marker=".", label=label)
        cut = values(found, "truncated_share")
        axes.plot(at, cut, color=RED, linewidth=1, alpha=0.6)
    for k, style in styles.items():
        axes.plot([], [], style, color=GREY, label=f"k = {k}")
    axes.plot([], [], color=RED, label="truncated, share")
    axes.set(xlabel="GRPO steps before", ylabel="held-out problems solved", ylim=(-0.02, 1.4))
    axes.set_yticks(np.arange(0, 1.1, 0.2))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)


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
    axes.set(xlabel="GRPO step", ylabel="seconds; down: its update", ylim=(-top, top))
    axes.legend(frameon=False, fontsize=7.5, loc="upper right", ncols=2)


def _memory(axes: Axes, run: Run) -> None:
    if "memory" not in run:
        return
    seconds, used, busy = np.array(run["memory"]["rows"]).T
    axes.plot(seconds, used / 1024, color=BLUE, linewidth=1.5, label="used, GiB")
    axes.plot(seconds, busy, color=GREY, linewidth=0.6, alpha=0.6, label="busy, %")
    axes.set(xlabel="seconds", ylabel="GPU memory used, GiB; busy, %", ylim=(0, 140))
    axes.legend(frameon=False, fontsize=8, loc="upper right")


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
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    given = parser.parse_args()
    draw(load(given.results), given.figures)


if __name__ == "__main__":
    main()
