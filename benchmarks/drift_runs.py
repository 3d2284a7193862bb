"""Drift over whole runs of the demo job, with and without what removes it.

`python -m benchmarks.drift_runs [--steps 60] [--only CASE ...] [--runs FOLDER] [--figure FILE]`.
Every case is one run of the demo job with a few keys changed; a case that has a run in FOLDER is
not run again. Then mean |Δ log p| of every step is drawn beside the bound that the case must hold,
and a table says what it came to; the curves are written beside the figure, as JSON. `demo`,
`demo-replay` and `fp32` are what docs/numerics.md promises bounds for.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from services.trainer.report.curves import Curves, step_curves
from services.trainer.report.events import EVENTS_FILE, read_events
from shared.statistics import linear_fit

ROUTING = ("actor.replay.routing=true",)
REPLAY = (*ROUTING, "actor.replay.indexer=true")
UNROUNDED = ("actor.quantisation=none",)
FP32 = (*UNROUNDED, "rollout.weights=float32", "rollout.quantise_activations=false")
STRICT = ("algorithm.max_lag=0",)


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    changes: tuple[str, ...]
    bound: float | None  # of the mean of every step; None where nothing is promised


CASES = {
    "demo": Case("the demo: full FP8 sampler, actor rounds alike", (), 0.04),
    "demo-replay": Case("the demo, experts replayed", ROUTING, 0.02),
    "demo-replay-both": Case("the demo, experts and entries replayed", REPLAY, 0.02),
    "strict": Case("the demo, lag 0", STRICT, 0.04),
    "strict-replay": Case(
        "the demo, experts and entries replayed, lag 0", (*STRICT, *REPLAY), 0.02
    ),
    "none": Case("actor rounds nothing", UNROUNDED, None),
    "weights": Case("actor rounds weights, not activations", ("actor.quantisation=weights",), None),
    "none-replay": Case("actor rounds nothing, replaying", (*UNROUNDED, *REPLAY), None),
    "fp32": Case("FP32 sampler and FP32 actor, lag 0", (*FP32, *STRICT), 1e-4),
    "fp32-lag": Case("FP32 sampler and FP32 actor, lag 1", FP32, None),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Mean |Δ log p| of a case's steps."""

    case: Case
    curves: Curves

    @property
    def verdict(self) -> str:
        if self.case.bound is None:
            return ""
        over = int((self.curves.delta_mean >= self.case.bound).sum())
        return f"below {self.case.bound:g}" if not over else f"{over} steps above"

    def row(self) -> list[str]:
        means = self.curves.delta_mean
        fit = linear_fit(means, self.curves.step)
        return [
            self.case.what,
            str(len(means)),
            f"{means.mean():.1e}",
            f"{means[-5:].mean():.1e}",
            f"{means.max():.1e}",
            f"{fit.slope:+.1e} [{fit.low:+.1e}, {fit.high:+.1e}]",
            f"{self.curves.lag_mean.mean():.2f}",
            self.verdict,
        ]


def run_case(case: Case, folder: Path, *, steps: int) -> None:
    """Everything that a demo starts is stopped when it returns."""
    changes = [f"--set={change}" for change in case.changes]
    arguments = ["demo", f"--steps={steps}", "--ports-from=0", f"--runs-dir={folder}", *changes]
    subprocess.run([sys.executable, "-m", "services.cli", *arguments], check=True)


def found_in(folder: Path, case: Case) -> Found | None:
    """The newest run in the folder."""
    runs = sorted(folder.glob(f"*/{EVENTS_FILE}"), key=lambda path: path.stat().st_mtime)
    return Found(case, step_curves(read_events(runs[-1]))) if runs else None


def write_curves(found: Sequence[Found], path: Path) -> None:
    """What is drawn, so that it can be drawn again and looked up."""
    curves = [
        {
            "case": one.case.what,
            "changes": one.case.changes,
            "bound": one.case.bound,
            "step": one.curves.step.tolist(),
            "mean_abs_delta_logprob": [float(f"{mean:.4g}") for mean in one.curves.delta_mean],
        }
        for one in found
    ]
    path.write_text(json.dumps(curves, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(found: Sequence[Found], path: Path) -> None:
    """One panel a bound, on a logarithmic axis: the cases span five orders of magnitude."""
    figure = Figure(figsize=(8.4, 4.6), dpi=144)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for one in found:
        floor = np.maximum(one.curves.delta_mean, 1e-8)
        style = "--" if set(ROUTING) <= set(one.case.changes) else "-"
        axes.semilogy(one.curves.step, floor, style, linewidth=1.5, label=one.case.what)
    for bound in sorted({one.case.bound for one in found if one.case.bound is not None}):
        axes.axhline(bound, color="#64748b", linewidth=1, linestyle=":")
        axes.annotate(
            f"{bound:g}",
            (1, bound),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            color="#64748b",
            va="center",
            fontsize=8,
        )
    axes.set(xlabel="step", ylabel="mean |Δ log p| of the step's tokens")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--runs", type=Path, default=Path("runs/drift"))
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.only:
        folder = given.runs / name
        if found_in(folder, CASES[name]) is None:
            run_case(CASES[name], folder, steps=given.steps)
        if (one := found_in(folder, CASES[name])) is not None:
            found.append(one)
    columns = ("mean |Δ log p|", "steps", "mean", "last 5", "largest step", "slope", "lag", "bound")
    table = Table(*columns, box=None)
    for one in found:
        table.add_row(*one.row())
    Console(width=160).print(table)
    if given.figure is not None:
        draw(found, given.figure)
        write_curves(found, given.figure.with_suffix(".json"))


if __name__ == "__main__":
    main()
