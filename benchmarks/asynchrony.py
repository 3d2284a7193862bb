"""What asynchrony buys and what it costs: a job of the demo's task under bounds of staleness.

`python -m benchmarks.asynchrony [--steps 20] [--seeds 3] [--out DIR]` runs the job of
`asynchrony.toml` for each `max_lag` of 0, 1, 4, 8, with and without TIS, one after the other on one
local stack, and writes `asynchrony.png` and `asynchrony.json`. `--redraw` draws the latter again.
What is independent of each other are seeds: runs of one seed begin alike and draw the same prompts.
docs/algorithms.md reads the figures.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from services.cli.document import read_job
from services.cli.stack import check_stack, choose_ports, stack_programs
from services.client import TandemClient
from shared.local_stack import running
from shared.statistics import (
    Interval,
    linear_fit,
    mean_interval,
    moving_average,
    paired_difference,
)

JOB = Path(__file__).with_suffix(".toml")
LAGS = (0, 1, 4, 8)
AVERAGE_STEPS = 6
JOB_DEADLINE_S = 300.0
COLOURS = dict(zip(LAGS, ("#2563eb", "#059669", "#d97706", "#dc2626"), strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """One job; one value for each of its steps. `ended_s` counts from the first version served."""

    max_lag: int
    tis: bool
    seed: int
    reward: list[float]
    ended_s: list[float]
    lag: list[float]
    delta: list[float]


def job_document(*, steps: int, max_lag: int, tis: bool, seed: int) -> dict[str, Any]:
    """It has no evaluation: the online reward of all graded samples is the curve here."""
    kind = "tis" if tis else "none"
    changes = [
        f"name=lag-{max_lag}-{kind}",
        f"steps={steps}",
        f"seed={seed}",
        f"algorithm.max_lag={max_lag}",
        f"algorithm.correction.kind={kind}",
    ]
    return read_job(JOB, changes)


async def measure(*, steps: int, seeds: int, folder: Path, console: Console) -> list[Run]:
    ports = choose_ports(num_rollout=2, num_reward=1, base=0)
    check_stack(ports)
    runs: list[Run] = []
    programs = stack_programs(ports, data_dir=folder, runs_dir=folder)
    async with (
        running(programs, log_dir=folder),
        TandemClient(ports.trainer_url, patience_s=60) as client,
    ):
        for seed, max_lag, tis in settings(seeds):
            document = job_document(steps=steps, max_lag=max_lag, tis=tis, seed=seed)
            submitted = await client.submit(document)
            async with asyncio.timeout(JOB_DEADLINE_S):
                runs.append(await _follow(client, submitted.job_id, max_lag, tis, seed))
            last = runs[-1]
            console.print(
                f"{submitted.job_id}: {last.ended_s[-1]:.0f} s, reward "
                f"{np.mean(last.reward[-AVERAGE_STEPS:]):.3f}, lag {np.mean(last.lag):.2f}"
            )
    return runs


def settings(seeds: int) -> Iterator[tuple[int, int, bool]]:
    """Seed after seed, so that a machine that slows down slows all settings down."""
    for seed in range(seeds):
        for max_lag in LAGS:
            for tis in (True, False):
                yield seed, max_lag, tis


async def _follow(client: TandemClient, job_id: str, max_lag: int, tis: bool, seed: int) -> Run:
    run = Run(max_lag, tis, seed, [], [], [], [])
    began_s: float | None = None
    async for numbered in client.events(job_id):
        event, fields = numbered.event, numbered.event.fields
        if event.name == "update_committed" and began_s is None:
            began_s = event.at_s
        if event.name == "step":
            assert began_s is not None, "a step before any server had weights"
            run.reward.append(fields["reward_raw"])
            run.ended_s.append(event.at_s - began_s)
            run.lag.append(fields["lag_mean"])
            run.delta.append(fields["delta_logprob_mean"])
    state = await client.job(job_id)
    if state.state != "finished":
        raise RuntimeError(f"{job_id} {state.state}: {state.error}")
    return run


def table(runs: Sequence[Run]) -> Table:
    shown = Table("max_lag", "TIS", "steps/s", "lag", "mean |Δ log p|", "reward, last third")
    for max_lag in LAGS:
        for tis in (True, False):
            chosen = [run for run in runs if (run.max_lag, run.tis) == (max_lag, tis)]
            third = mean_interval([float(np.mean(_last_third(run.reward))) for run in chosen])
            speeds = [len(run.reward) / run.ended_s[-1] for run in chosen]
            shown.add_row(
                str(max_lag),
                "yes" if tis else "no",
                f"{np.mean(speeds):.2f}",
                f"{np.mean([np.mean(_last_third(run.lag)) for run in chosen]):.2f}",
                f"{np.mean([np.mean(_last_third(run.delta)) for run in chosen]):.4f}",
                f"{third.mean:.3f} [{third.low:.3f}, {third.high:.3f}]",
            )
    return shown


def falls(runs: Sequence[Run]) -> Table:
    """Reward of the last steps less that of the first, and with TIS less without, over seeds."""
    shown = Table("what", f"{AVERAGE_STEPS} steps, 95 % over seeds (t)")
    last: dict[tuple[int, bool], list[float]] = {}
    for max_lag in LAGS:
        for tis in (True, False):
            chosen = [run for run in runs if (run.max_lag, run.tis) == (max_lag, tis)]
            chosen.sort(key=lambda run: run.seed)
            last[max_lag, tis] = [float(np.mean(run.reward[-AVERAGE_STEPS:])) for run in chosen]
            first = [float(np.mean(run.reward[:AVERAGE_STEPS])) for run in chosen]
            what = f"lag {max_lag}, {'TIS' if tis else 'none'}: last less first"
            shown.add_row(what, _told(paired_difference(first, last[max_lag, tis])))
    for max_lag in LAGS:
        found = paired_difference(last[max_lag, False], last[max_lag, True])
        shown.add_row(f"lag {max_lag}: last, TIS less none", _told(found))
    return shown


def costs(runs: Sequence[Run]) -> Table:
    """What lag costs and TIS gives back, over all bounds: one number a seed."""
    shown = Table("what", "each seed", f"last {AVERAGE_STEPS} steps, 95 % over seeds (t)")
    for what, values in effects(runs).items():
        each = ", ".join(f"{value:+.3f}" for value in values)
        shown.add_row(what, each, _told(mean_interval(values)))
    return shown


def effects(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Of the reward of the last steps, one value a seed: the slope over `max_lag` of its runs with
    and without TIS, and the mean over all `max_lag` of what TIS makes better."""
    ends = {
        (run.seed, run.tis, run.max_lag): float(np.mean(run.reward[-AVERAGE_STEPS:]))
        for run in runs
    }
    seeds = sorted({run.seed for run in runs})
    of = {
        (seed, tis): [ends[seed, tis, lag] for lag in LAGS]
        for seed in seeds
        for tis in (True, False)
    }
    found = {
        f"{'TIS' if tis else 'none'}: reward for each version of max_lag": [
            linear_fit(of[seed, tis], LAGS).slope for seed in seeds
        ]
        for tis in (True, False)
    }
    gains = [float(np.mean(np.subtract(of[seed, True], of[seed, False]))) for seed in seeds]
    return found | {"TIS less none, mean of all lags": gains}


def _told(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:.3f}, {found.high:.3f}]"


def _last_third(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, len(values) // 3) :]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward against steps, against time; lag and drift against steps."""
    figure = Figure(figsize=(11, 7.4), dpi=144)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    for axes in panels.flat:
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for max_lag in LAGS:
        for tis in (True, False):
            chosen = [run for run in runs if (run.max_lag, run.tis) == (max_lag, tis)]
            _draw_setting(panels, chosen, max_lag, tis)
    first, second, third, fourth = panels.flat
    first.set(xlabel="step", ylabel=f"online reward, mean of {AVERAGE_STEPS} steps")
    second.set(xlabel="seconds since the first weights", ylabel="the same")
    third.set(xlabel="step", ylabel="lag in versions, mean of samples")
    fourth.set(xlabel="step", ylabel="mean |Δ log p|", yscale="log")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, format="png")


def _draw_setting(panels: Any, chosen: Sequence[Run], max_lag: int, tis: bool) -> None:
    first, second, third, fourth = panels.flat
    style: dict[str, Any] = {
        "color": COLOURS[max_lag],
        "linestyle": "-" if tis else "--",
        "linewidth": 1.6,
        "label": f"max_lag {max_lag}, {'TIS' if tis else 'no correction'}",
    }
    rewards = np.array([moving_average(run.reward, AVERAGE_STEPS) for run in chosen])
    seconds = np.mean([run.ended_s for run in chosen], axis=0)
    steps = np.arange(1, rewards.shape[1] + 1)
    _band(first, steps, rewards, style)
    _band(second, seconds, rewards, style)
    third.plot(steps, np.mean([run.lag for run in chosen], axis=0), **style)
    fourth.plot(steps, np.mean([run.delta for run in chosen], axis=0), **style)


def _band(axes: Axes, x: Any, rewards: Any, style: dict[str, Any]) -> None:
    """The seeds' mean, and between their lowest and highest where the line is solid."""
    axes.plot(x, rewards.mean(0), **style)
    if style["linestyle"] == "-":
        low, high = rewards.min(0), rewards.max(0)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.08, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.asynchrony")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--redraw", action="store_true", help="draw what was measured before")
    options = parser.parse_args()
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = options.out / "asynchrony.json"
    if options.redraw:
        runs = [Run(**run) for run in json.loads(numbers.read_text())]
    else:
        with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
            runs = asyncio.run(
                measure(
                    steps=options.steps,
                    seeds=options.seeds,
                    folder=Path(folder),
                    console=console,
                )
            )
        numbers.write_text(json.dumps([asdict(run) for run in runs]) + "\n")
    draw(runs, options.out / "asynchrony.png")
    console.print(table(runs))
    console.print(falls(runs))
    console.print(costs(runs))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
