"""A window of a run as lanes: the trainer's phases, updates, groups sampled, both GPUs' load."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TRAINER = {
    "wait": "#e2e8f0",
    "pack": "#1e40af",
    "forward_backward": "#2563eb",
    "optimizer": "#1e40af",
    "export": "#93c5fd",
    "publish": "#ddd6fe",
    "checkpoint": "#64748b",
}
UPDATE = {"stage": "#a7f3d0", "prepare": "#34d399", "pause": "#f97316"}
TOLD = {"forward_backward": "train"}
ODD_EVEN = ("#0f766e", "#d97706")  # by the version that sampled
BIN_S = 0.25
INK = "#0f172a"


def timeline_figure(window: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(13.5, 5.6), dpi=110)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    lanes, groups, busy = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1.3, 1.5))
    _lane(lanes, window["trainer"], TRAINER, at=1.0)
    _lane(lanes, window["update"], UPDATE, at=0.0)
    lanes.set(ylim=(-0.55, 2.2), yticks=(0, 1), yticklabels=("update", "trainer"))
    lanes.legend(frameon=False, fontsize=8, ncols=8, loc="upper left")
    _groups(groups, window["groups"], window["seconds"])
    _busy(busy, window["gpus"])
    for axes in (lanes, groups, busy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
    busy.set(xlabel="seconds of the job", xlim=window["seconds"])
    return figure


def _lane(
    axes: Axes, rows: Sequence[Sequence[Any]], colours: Mapping[str, str], *, at: float
) -> None:
    """Every span, the number of its step or version above the middle."""
    named = set()
    for name, begins_s, ends_s, _ in rows:
        shown = {"pack": "", "optimizer": ""}.get(name, TOLD.get(name, name))
        label = shown if shown and shown not in named and ends_s - begins_s > 0.1 else None
        named |= {shown} if label else set()
        axes.barh(at, ends_s - begins_s, 0.55, begins_s, color=colours[name], label=label)
    for number in sorted({row[3] for row in rows}):
        own = [row for row in rows if row[3] == number]
        middle = (own[0][1] + own[-1][2]) / 2
        text = {"ha": "center", "va": "center", "fontsize": 7.5, "color": INK, "clip_on": True}
        axes.text(middle, at + 0.37, str(number), **text)


def _groups(axes: Axes, rows: Sequence[Sequence[Any]], seconds: Sequence[float]) -> None:
    edges = np.arange(seconds[0], seconds[1] + BIN_S, BIN_S)
    below = np.zeros(len(edges) - 1)
    for number, colour in enumerate(ODD_EVEN):
        at = [at_s for at_s, version in rows if version is not None and version % 2 == number]
        found = np.histogram(at, edges)[0] / BIN_S
        axes.bar(edges[:-1], found, BIN_S, below, align="edge", color=colour, linewidth=0)
        below += found
    for number, name in enumerate(("an even version", "an odd version")):
        axes.bar(0, 0, color=ODD_EVEN[number], label=f"by {name}")
    axes.set(ylabel="groups/s", ylim=(0, float(below.max()) * 1.45))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _busy(axes: Axes, gpus: Mapping[str, Sequence[Sequence[float]]]) -> None:
    names = {"0": "GPU 0, the actor's", "1": "GPU 1, the server's"}
    if len(gpus) == 1:
        names = dict.fromkeys(gpus, "the GPU of both")
    for (index, rows), colour in zip(gpus.items(), ("#2563eb", "#dc2626"), strict=False):
        at, busy = np.array(rows).T
        axes.fill_between(at, busy, step="post", color=colour, alpha=0.25, linewidth=0)
        axes.step(at, busy, where="post", color=colour, linewidth=0.9, label=names.get(index))
    axes.set(ylabel="busy, %", ylim=(0, 140), yticks=(0, 50, 100))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
