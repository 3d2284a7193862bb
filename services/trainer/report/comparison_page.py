"""The page of two runs: one file with its figures inside, in the look of a report."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from services.trainer.report.comparison import Difference, PassDifference, RunComparison, RunSide
from services.trainer.report.curves import Curve
from services.trainer.report.figures import AVERAGE_STEPS, Draw, save_panels
from services.trainer.report.markup import Row, figure, page, section, table, tiles
from services.trainer.report.sentences import number, share, signed_share
from shared.statistics import LEVEL, moving_average

_COLOURS = ("#2563eb", "#d97706")


def render_comparison(found: RunComparison) -> str:
    """Takes a second of CPU: not for an event loop."""
    with tempfile.TemporaryDirectory(prefix="tandem-compare-") as folder:
        figures = _draw(found, Path(folder))
        return _page(found, figures)


def headline(found: RunComparison) -> str:
    """The last pass@1 that both have, in words that the test allows."""
    last = [one for one in found.passes if one.k == "1"]
    if not last:
        return "The two runs have no evaluation after the same step."
    return pass_sentence(last[-1])


def pass_sentence(one: PassDifference) -> str:
    told = f"pass@{one.k} after step {one.step}: A {share(one.a)}, B {share(one.b)}"
    if not one.is_paired:
        return f"{told}; the problems are not the same, so there is no paired interval."
    interval = f"{signed_share(one.low)} to {signed_share(one.high)}"
    verdict = "B differs from A" if one.is_significant else "no difference is shown"
    return (
        f"{told}; B − A {signed_share(one.difference)}, 95 % interval {interval}, paired over "
        f"{one.num_problems} problems, sign-flip p = {number(one.p_value)}: {verdict} "
        f"({'at or below' if one.is_significant else 'above'} {LEVEL:g})."
    )


def _page(found: RunComparison, figures: dict[str, Path]) -> str:
    a, b = found.a, found.b
    head = ("", f"A: {a.name}", f"B: {b.name}")
    shown = [
        ("A", a.name),
        ("B", b.name),
        ("A: steps", str(len(a.curves))),
        ("B: steps", str(len(b.curves))),
    ]
    settings = (
        f"{len(found.settings)} fields of the job differ."
        if found.settings
        else ("The two jobs are the same.")
    )
    sections = [
        tiles(shown),
        section("What was set differently", settings, _differences(head, found.settings)),
        section("Online reward", figure(figures, "reward")),
        section("Sampler against trainer", figure(figures, "delta_logprob")),
        section("Offline evaluation", figure(figures, "pass_at_k"), _passes(found.passes)),
        section("Numbers and times", figure(figures, "step_seconds"), _measures(head, found)),
        *([section("Machines", _differences(head, found.machines))] if found.machines else []),
        section(
            "How these numbers were made",
            "Everything is computed from the events of the two runs. A difference of pass@k is a "
            "mean over the problems that both runs were asked, with Student's 95 % interval; "
            f"whether there is one is decided by Fisher's sign-flip test at {100 * LEVEL:g} %. "
            "Curves are averaged over ten steps, their own values faint.",
        ),
    ]
    return page(f"{a.name} and {b.name}", headline(found), sections)


def _differences(head: Row, found: list[Difference]) -> str:
    return table(head, [(one.key, _text(one.a), _text(one.b)) for one in found]) if found else ""


def _passes(found: list[PassDifference]) -> str:
    if not found:
        return ""
    rows: list[Row] = []
    for one in found:
        interval = f"[{signed_share(one.low)}, {signed_share(one.high)}]" if one.is_paired else "–"
        verdict = "–"
        if one.is_paired:
            verdict = "differs" if one.is_significant else "not shown"
        change = signed_share(one.difference)
        p_value = number(one.p_value)
        rows.append(
            (one.step, f"pass@{one.k}", share(one.a), share(one.b), change, interval, p_value,
             verdict)
        )  # fmt: skip
    return table(("step", "", "A", "B", "B − A", "95 %", "p", ""), rows)


def _measures(head: Row, found: RunComparison) -> str:
    rows = [
        (f"{one.name}{f' ({one.unit})' if one.unit else ''}", number(one.a), number(one.b),
         _ratio(one.a, one.b))
        for one in found.measures
    ]  # fmt: skip
    return table((*head, "B / A"), rows)


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.3g}" if math.isfinite(a) and math.isfinite(b) and a > 0 else "–"


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _draw(found: RunComparison, folder: Path) -> dict[str, Path]:
    panels: dict[str, Draw] = {}
    sides = (found.a, found.b)
    if any(len(side.curves) for side in sides):
        panels["reward"] = _curves(sides, "reward_raw", "online reward")
        panels["delta_logprob"] = _curves(sides, "delta_mean", "mean |Δ log p|")
        panels["step_seconds"] = _curves(sides, "step_seconds", "seconds per step")
    if any(side.summary.evaluations for side in sides):
        panels["pass_at_k"] = lambda axes: _pass_at_1(axes, sides)
    return {name: save_panels(folder / f"{name}.png", [draw]) for name, draw in panels.items()}


def _curves(sides: tuple[RunSide, ...], name: str, label: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for letter, side, colour in zip("AB", sides, _COLOURS, strict=True):
            steps, values = side.curves.step, getattr(side.curves, name)
            _curve(axes, steps, values, colour=colour, label=f"{letter}: {side.name}")
        axes.set(xlabel="step", ylabel=label)

    return draw


def _curve(axes: Axes, steps: Curve, values: Curve, *, colour: str, label: str) -> None:
    if not np.isfinite(values).any():
        return
    window = max(AVERAGE_STEPS, values.size // 50)
    axes.plot(steps, values, ".", color=colour, alpha=0.25, markersize=4)
    axes.plot(steps, moving_average(values, window), color=colour, linewidth=2, label=label)


def _pass_at_1(axes: Axes, sides: tuple[RunSide, ...]) -> None:
    for letter, side, colour in zip("AB", sides, _COLOURS, strict=True):
        found = [one for one in side.summary.evaluations if "1" in one.pass_at_k]
        values = [one.pass_at_k["1"] for one in found]
        bounds = [
            one.pass_at_k_ci.get("1", (value, value))
            for one, value in zip(found, values, strict=True)
        ]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)],
        ]
        axes.errorbar(
            [one.step for one in found], values, errors, fmt="-o", color=colour, capsize=3,
            markersize=4, label=f"{letter}: {side.name}",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="pass@1 (bars: 95 % interval)")
