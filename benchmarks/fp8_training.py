"""FP8 training against its own dtype: the demo's job, by seed, in drift, pass@1 and reward.

`python -m benchmarks.fp8_training [--steps 40] [--seeds 3] [--only CASE ...] [--out DIR]` runs the
demo once for every case and seed, one after the other, and keeps what each found in
`fp8_training.json`: a run that is there is not run again, so an interrupted comparison goes on.
Then it prints a table and draws `fp8_training.png`. docs/fp8-training.md reads the figures.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from services.trainer.report.curves import step_curves
from services.trainer.report.evaluations import finished_evaluations
from services.trainer.report.events import EVENTS_FILE, read_events

RESULTS_FILE, FIGURE_FILE = "fp8_training.json", "fp8_training.png"
UNROUNDED = ("actor.quantisation=none",)
FP8 = ("actor.precision=fp8",)


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    changes: tuple[str, ...]
    colour: str
    steps: int | None = None


CASES = {
    "exact": Case("FP32 actor, as it is", UNROUNDED, "#dc2626"),
    "fp8": Case("FP8 actor", (*UNROUNDED, *FP8), "#2563eb"),
    "full": Case("FP32 actor that rounds as its sampler", (), "#d97706"),
    "full-fp8": Case("FP8 actor that rounds as its sampler", FP8, "#059669"),
    "bf16": Case("BF16 actor, as it is", (*UNROUNDED, "actor.dtype=bfloat16"), "#64748b", steps=20),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One job; one value for each of its steps, pass@1 by evaluated version."""

    case: str
    seed: int
    delta: list[float]
    reward: list[float]
    pass_at_1: dict[str, float]

    @property
    def last_pass_at_1(self) -> float:
        return self.pass_at_1[max(self.pass_at_1, key=int)]


def missing(found: Sequence[Run], names: Sequence[str], seeds: int) -> Iterator[tuple[str, int]]:
    """Seeds turn fastest last: a comparison that is cut short has all cases of the first seeds."""
    done = {(run.case, run.seed) for run in found}
    for seed in range(seeds):
        for name in names:
            if (name, seed) not in done:
                yield name, seed


def run_one(name: str, seed: int, *, steps: int, runs: Path) -> Run:
    """Everything that a demo starts is stopped when it returns."""
    case, folder = CASES[name], runs / f"{name}-{seed}"
    steps = case.steps or steps
    changes = [*case.changes, f"seed={seed}", "eval.every_steps=20"]
    arguments = ["demo", f"--steps={steps}", "--ports-from=0", f"--runs-dir={folder}"]
    arguments += [f"--set={change}" for change in changes]
    subprocess.run([sys.executable, "-m", "services.cli", *arguments], check=True)
    newest = max(folder.glob(f"*/{EVENTS_FILE}"), key=lambda path: path.stat().st_mtime)
    events = read_events(newest)
    curves = step_curves(events)
    return Run(
        case=name,
        seed=seed,
        delta=curves.delta_mean.tolist(),
        reward=curves.reward_raw.tolist(),
        pass_at_1={str(e.policy_version): e.pass_at_k["1"] for e in finished_evaluations(events)},
    )


def load(path: Path) -> list[Run]:
    return [Run(**run) for run in json.loads(path.read_text())] if path.exists() else []


def keep(found: Sequence[Run], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_suffix(".building")
    building.write_text(json.dumps([asdict(run) for run in found], indent=1) + "\n")
    building.rename(path)


def table(found: Sequence[Run]) -> Table:
    columns = ("case", "seeds", "steps", "mean |Δ log p|", "last 5", "largest step")
    result = Table(*columns, "pass@1 before", "after", box=None)
    for name, case in CASES.items():
        runs = [run for run in found if run.case == name]
        if not runs:
            continue
        deltas = [np.array(run.delta) for run in runs]
        result.add_row(
            case.what,
            str(len(runs)),
            str(max(map(len, deltas))),
            _spread([delta.mean() for delta in deltas], ".1e"),
            _spread([delta[-5:].mean() for delta in deltas], ".1e"),
            f"{max(delta.max() for delta in deltas):.1e}",
            _spread([run.pass_at_1["0"] for run in runs], ".3f"),
            _spread([run.last_pass_at_1 for run in runs], ".3f"),
        )
    return result


def _spread(values: Sequence[float], form: str) -> str:
    """The mean over seeds, and what each of them came to."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{np.mean(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})"


def draw(found: Sequence[Run], path: Path) -> None:
    """Drift of every step and pass@1 of every evaluated version; thin lines are seeds."""
    figure = Figure(figsize=(10.2, 4.4), dpi=144)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    drift, score = figure.subplots(1, 2)
    for name, case in CASES.items():
        runs = [run for run in found if run.case == name]
        if not runs:
            continue
        steps = min(len(run.delta) for run in runs)
        by_seed = np.array([run.delta[:steps] for run in runs])
        _seeds(drift, np.arange(1, steps + 1), by_seed, case)
        versions = sorted(set.intersection(*({int(v) for v in run.pass_at_1} for run in runs)))
        by_seed = np.array([[run.pass_at_1[str(v)] for v in versions] for run in runs])
        _seeds(score, np.array(versions), by_seed, case)
    drift.set_yscale("log")
    drift.set(xlabel="step", ylabel="mean |Δ log p| of the step's tokens")
    score.set(xlabel="policy version", ylabel="pass@1 on held-out sums")
    for axes in (drift, score):
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = drift.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


def _seeds(axes: Axes, x: np.ndarray, by_seed: np.ndarray, case: Case) -> None:
    for values in by_seed:
        axes.plot(x, values, color=case.colour, linewidth=0.7, alpha=0.45)
    axes.plot(x, by_seed.mean(0), color=case.colour, linewidth=2, label=case.what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--most", type=int, help="end after this many runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    given = parser.parse_args()
    results = given.out / RESULTS_FILE
    found = load(results)
    for name, seed in list(missing(found, given.only, given.seeds))[: given.most]:
        found.append(run_one(name, seed, steps=given.steps, runs=given.runs))
        keep(found, results)
    Console(width=200).print(table(found))
    draw(found, given.out / FIGURE_FILE)


if __name__ == "__main__":
    main()
