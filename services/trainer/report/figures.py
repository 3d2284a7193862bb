"""The report's PNGs, drawn with matplotlib's Agg canvas: no display, no global state."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from services.trainer.report.curves import PHASES, Curve, Curves
from services.trainer.report.evaluations import Evaluation, shown_of
from services.trainer.report.updates import Update, draw_shares, draw_timeline
from shared.statistics import linear_fit, moving_average

AVERAGE_STEPS = 10
MAX_BARS = 120
MANY_STEPS = 500  # from here on a curve is drawn averaged over its own faint values

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2563eb", "#d97706", "#059669", "#dc2626", "#64748b"
_PALETTE = (_BLUE, _ORANGE, _GREEN, _RED, "#7c3aed", "#0891b2", "#be185d", "#65a30d", _GREY)
PHASE_COLOURS = dict(zip(PHASES, (*_PALETTE[:-1], "#854d0e"), strict=True)) | {"other": "#cbd5e1"}
_SIZE = (8.4, 3.9)  # inches

Draw = Callable[[Axes], None]


def draw_figures(
    curves: Curves,
    evaluations: list[Evaluation],
    updates: list[Update],
    folder: Path,
    *,
    drift_bound: float,
) -> dict[str, Path]:
    """Write one PNG per subject that has data; returns name -> file."""
    panels: dict[str, list[Draw]] = {}
    if len(curves):
        panels["reward"] = [lambda axes: _reward(axes, curves)]
        panels["delta_logprob"] = [
            lambda axes: _delta_mean(axes, curves, drift_bound),
            lambda axes: _delta_p99(axes, curves),
        ]
        panels["step_seconds"] = [lambda axes: _phases(axes, curves)]
        panels["lag"] = [lambda axes: _lag(axes, curves)]
    if evaluations:
        panels["pass_at_k"] = [lambda axes: _pass_at_k(axes, evaluations)]
    if updates:
        panels["updates"] = [
            lambda axes: draw_timeline(axes, updates),
            lambda axes: draw_shares(axes, updates),
        ]
    return {name: save_panels(folder / f"{name}.png", draws) for name, draws in panels.items()}


def save_panels(path: Path, draws: Sequence[Draw]) -> Path:
    """One panel per function, below each other; a reader sees the old file or the new one."""
    width, height = _SIZE
    figure = Figure(figsize=(width, height * (0.6 + 0.4 * len(draws))), dpi=144)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    for row, draw in enumerate(draws, start=1):
        _panel(figure.add_subplot(len(draws), 1, row), draw)
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png")
    return unfinished.replace(path)


def _panel(axes: Axes, draw: Draw) -> None:
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#94a3b8")
    axes.tick_params(colors="#334155")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    draw(axes)
    _, labels = axes.get_legend_handles_labels()
    columns = max(1, 110 // (max(map(len, labels), default=0) + 8))
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(len(labels), columns),
        frameon=False,
        fontsize=9,
    )


def _reward(axes: Axes, curves: Curves) -> None:
    steps, raw, trained = curves.step, curves.reward_raw, curves.reward_trained
    window = max(AVERAGE_STEPS, len(curves) // 50)
    faint = 0.5 if len(curves) < MANY_STEPS else 0.15
    axes.plot(steps, raw, ".", color=_BLUE, alpha=faint, markersize=4, label="all graded samples")
    axes.plot(
        steps,
        moving_average(raw, window),
        color=_BLUE,
        linewidth=2,
        label=f"all graded samples, mean of {window} steps",
    )
    fit = linear_fit(raw, steps)
    if math.isfinite(fit.slope):
        ends = np.array([steps[0], steps[-1]])
        label = f"linear fit: {fit.slope:+.2g} a step"
        if math.isfinite(fit.low):
            label += f" [{fit.low:+.2g}, {fit.high:+.2g}]"
        axes.plot(ends, [fit.at(x) for x in ends], "--", color=_RED, linewidth=1.5, label=label)
    axes.plot(
        steps,
        moving_average(trained, window),
        color=_GREY,
        linewidth=1.3,
        label=f"trained groups only, mean of {window} steps",
    )
    axes.set(xlabel="step", ylabel="online reward")


def _delta_mean(axes: Axes, curves: Curves, bound: float) -> None:
    draw_line(axes, curves.step, curves.delta_mean, colour=_BLUE, label="mean of tokens")
    fit = linear_fit(curves.delta_mean, curves.step)
    if math.isfinite(fit.low):
        ends = np.array([curves.step[0], curves.step[-1]])
        label = f"fit: {fit.slope:+.1e} a step [{fit.low:+.1e}, {fit.high:+.1e}]"
        axes.plot(ends, [fit.at(x) for x in ends], "--", color=_RED, linewidth=1.2, label=label)
    axes.axhline(
        bound, color=_GREY, linewidth=1.2, linestyle=":", label=f"expected below {bound:g}"
    )
    if np.nanmax(curves.delta_mean, initial=0.0) < bound / 20:
        axes.set_yscale("log")  # else the curve would lie on the axis
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("mean |Δ log p|")


def _delta_p99(axes: Axes, curves: Curves) -> None:
    """A panel of its own: the tail is often more than ten times the mean."""
    draw_line(axes, curves.step, curves.delta_p99, colour=_ORANGE, label="p99 of tokens")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel="p99 |Δ log p|")


def draw_line(axes: Axes, steps: Curve, values: Curve, *, colour: str, label: str) -> None:
    if values.size < MANY_STEPS:
        axes.plot(steps, values, color=colour, linewidth=1.5, label=label)
        return
    window = values.size // 50
    axes.plot(steps, values, color=colour, linewidth=0.5, alpha=0.2)
    averaged = moving_average(values, window)
    axes.plot(steps, averaged, color=colour, linewidth=1.8, label=f"{label}, mean of {window}")


def _phases(axes: Axes, curves: Curves) -> None:
    """Stacked bars; many steps share one bar (their mean), so that the file stays readable."""
    width = max(1, math.ceil(len(curves) / MAX_BARS))
    starts = np.arange(0, len(curves), width)
    bottom = np.zeros(starts.size)
    for name, seconds in curves.phases.items():
        height = _binned(seconds, width)
        if height.sum() == 0:
            continue
        axes.bar(
            curves.step[starts] - 0.5,
            height,
            width=width,
            align="edge",
            bottom=bottom,
            color=PHASE_COLOURS.get(name, _GREY),
            label=name.replace("_", " "),
            linewidth=0,
        )
        bottom += height
    axes.set(xlabel="step" if width == 1 else f"step (bars: mean of {width} steps)")
    axes.set_ylabel("seconds per step")
    if bottom.size > 4 and bottom.max() > 5 * np.median(bottom) > 0:
        axes.set_ylim(0, 3 * float(np.median(bottom)))
        over = int((bottom > axes.get_ylim()[1]).sum())
        axes.set_title(f"{over} bars reach beyond the axis", fontsize=9, color="#334155")


def _binned(values: Curve, width: int) -> Curve:
    binned: Curve = np.array(
        [values[start : start + width].mean() for start in range(0, values.size, width)]
    )
    return binned


def _lag(axes: Axes, curves: Curves) -> None:
    axes.plot(
        curves.step, curves.lag_max, ".", color=_ORANGE, markersize=4, label="largest in the step"
    )
    draw_line(axes, curves.step, curves.lag_mean, colour=_BLUE, label="mean of samples")
    axes.set_ylim(0, max(1.0, float(np.nanmax(curves.lag_max, initial=0.0))) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="lag in versions")


def _pass_at_k(axes: Axes, evaluations: list[Evaluation]) -> None:
    steps = [evaluation.step for evaluation in evaluations]
    for k, colour in zip(shown_of(evaluations), cycle(_PALETTE), strict=False):
        values = [evaluation.pass_at_k.get(k, math.nan) for evaluation in evaluations]
        bounds = [evaluation.pass_at_k_ci.get(k, (math.nan,) * 2) for evaluation in evaluations]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        axes.errorbar(
            steps, values, errors, fmt="-o", color=colour, capsize=3, markersize=4,
            linewidth=1.8 if k == "1" else 1.2, elinewidth=0.9, label=f"pass@{k}",
        )  # fmt: skip
    truncated = [math.nan if e.truncated_share is None else e.truncated_share for e in evaluations]
    axes.plot(steps, truncated, ":s", color=_GREY, markersize=4, label="truncated")
    axes.set_ylim(-0.02, 1.02)
    axes.set(xlabel="step", ylabel="share (bars: 95 % interval)")
