"""Two runs side by side: what was set differently, and what came of it.

pass@k is compared problem by problem where both runs asked the same problems at the same step, so
that their difficulty cancels; elsewhere there are only the two intervals.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.report.curves import Curves, step_curves
from services.trainer.report.evaluations import Evaluation, finished_evaluations, shown_of
from services.trainer.report.events import EVENTS_FILE, RunEvents, read_events
from services.trainer.report.summary import Summary, job_document, summarise
from services.trainer.run_environment import read_environment
from shared.errors import TandemError
from shared.statistics import LEVEL, paired_difference, sign_flip_p

ABSENT = "–"
MAX_STEPS_SHOWN = 12
# Of a process's environment: other at every start, and nothing follows from it.
_OF_ONE_START = re.compile(
    r"\.(pid|port|shards_port|advertise_url|redis_url|url|available_memory_bytes|\w+_dir)$"
    r"|\.variables\.(TANDEM|TORCHELASTIC)_"
)


class NoRun(TandemError):
    """There are no events of such a run."""


@dataclass(frozen=True, slots=True)
class RunSide:
    """One of the two runs. `environment` is what the run's folder says of its machine."""

    name: str
    summary: Summary
    curves: Curves
    job: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the job, or of the environment, that is not the same; absent is `–`."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class PassDifference:
    """pass@k of B less A after the same step; paired only over the same problems."""

    step: int
    k: str
    a: float
    b: float
    is_paired: bool
    num_problems: int
    difference: float
    low: float
    high: float
    p_value: float

    @property
    def is_significant(self) -> bool:
        return self.is_paired and self.p_value <= LEVEL


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of each run; nan where a run has none."""

    name: str
    unit: str
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    a: RunSide
    b: RunSide
    settings: list[Difference]
    machines: list[Difference]
    measures: list[Measure]
    passes: list[PassDifference]

    @property
    def absence(self) -> str:
        """Why pass@k is not compared; empty where it is."""
        if self.passes:
            return ""
        if never := [one.name for one in (self.a, self.b) if not one.summary.evaluations]:
            return f"pass@k is not compared; never evaluated: {', '.join(never)}."
        return "pass@k is not compared: the two runs' evaluations have no k in common."

    def document(self) -> dict[str, Any]:
        """Plain JSON values; nan becomes None."""
        return {
            "a": self.a.name,
            "b": self.b.name,
            "settings": [asdict(one) for one in self.settings],
            "machines": [asdict(one) for one in self.machines],
            "measures": [_plain(asdict(one)) for one in self.measures],
            "pass_at_k": [_plain(asdict(one)) for one in self.passes],
            "curves": {
                name: {
                    side: _listed(values)
                    for side, one in (("a", self.a), ("b", self.b))
                    for values in [getattr(one.curves, name)]
                }
                for name in ("step", "reward_raw", "delta_mean", "step_seconds")
            },
        }


def read_side(run_dir: Path) -> RunSide:
    """`NoRun` if the folder has no events."""
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        raise NoRun(f"{run_dir} is no run: it has no {EVENTS_FILE}")
    return side_of(run_dir.resolve().name, read_events(path), read_environment(run_dir))


def side_of(name: str, run: RunEvents, environment: Mapping[str, Any]) -> RunSide:
    curves = step_curves(run)
    summary = summarise(run, curves, finished_evaluations(run))
    return RunSide(name, summary, curves, job_document(run), dict(environment))


def compare_runs(a: RunSide, b: RunSide) -> RunComparison:
    return RunComparison(
        a,
        b,
        settings=differences(a.job, b.job),
        machines=_of_processes(
            one
            for one in differences(a.environment, b.environment)
            if not _OF_ONE_START.search(one.key) and not _is_own_path(one, a.name, b.name)
        ),
        measures=_measures(a, b),
        passes=_passes(a.summary.evaluations, b.summary.evaluations),
    )


def _is_own_path(one: Difference, a: str, b: str) -> bool:
    """Whether the two differ by nothing but each run's name."""
    return str(one.a).replace(a, "") == str(one.b).replace(b, "")


def _of_processes(found: Iterable[Difference]) -> list[Difference]:
    """What differs alike in several processes (`PROCESS.field`) is one line."""
    alike: dict[tuple[str, str, str], list[Difference]] = {}
    for one in found:
        field = one.key.partition(".")[2] or one.key
        alike.setdefault((field, str(one.a), str(one.b)), []).append(one)
    return [
        several[0]
        if len(several) == 1
        else replace(several[0], key=f"{len(several)} processes: {field}")
        for (field, _, _), several in alike.items()
    ]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Leaves that are not the same, by their dotted names, in order.

    A section that one of the two has not is one line.
    """
    return [
        one
        for key in sorted({*a, *b})
        for one in _difference(key, a.get(key, ABSENT), b.get(key, ABSENT))
    ]


def _difference(key: str, a: Any, b: Any) -> list[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [replace(one, key=f"{key}.{one.key}") for one in differences(a, b)]
    return [] if a == b else [Difference(key, _brief(a), _brief(b))]


def _brief(value: Any) -> Any:
    return f"given ({len(value)} fields)" if isinstance(value, Mapping) and value else value


def pass_at_k(correct: int, num_samples: int, k: int) -> float:
    """Unbiased estimate of one problem (Chen et al. 2021, arXiv:2107.03374, equation 1)."""
    if k > num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    return 1.0 - math.comb(num_samples - correct, k) / math.comb(num_samples, k)


def _measures(a: RunSide, b: RunSide) -> list[Measure]:
    def of(name: str, unit: str, of_side: Any) -> Measure:
        return Measure(name, unit, float(of_side(a)), float(of_side(b)))

    phases = dict.fromkeys([*a.curves.phases, *b.curves.phases])
    return [
        of("steps", "", lambda s: len(s.curves)),
        of("online reward, mean", "", lambda s: s.summary.reward_raw.mean),
        of("online reward, first third", "", lambda s: s.summary.reward_raw.first.mean),
        of("online reward, last third", "", lambda s: s.summary.reward_raw.last.mean),
        of("online reward, slope", "a step", lambda s: s.summary.reward_raw.slope.per_step),
        of("mean |Δ log p|", "", lambda s: s.summary.delta_logprob.mean),
        of("p99 |Δ log p|", "", lambda s: s.summary.delta_logprob.p99),
        of("largest |Δ log p|", "", lambda s: s.summary.delta_logprob.max),
        of("lag, mean", "versions", lambda s: s.summary.lag_mean),
        of("whole run", "s", lambda s: s.summary.wall_s),
        of("step, mean", "s", lambda s: s.summary.step_seconds_mean),
        of("tokens trained", "a second", lambda s: _nanmean(s.curves.tokens_per_s)),
        of("update pause, mean", "s", lambda s: s.summary.updates.pause_s_mean),
        *(of(f"step: {phase}", "s", lambda s, p=phase: _phase_mean(s, p)) for phase in phases),
    ]


def _phase_mean(side: RunSide, phase: str) -> float:
    return _nanmean(side.curves.phases.get(phase, np.array([])))


def _nanmean(values: Any) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if kept.size else math.nan


def _passes(a: Sequence[Evaluation], b: Sequence[Evaluation]) -> list[PassDifference]:
    """Of the steps that both evaluated: the first, the last and as many between as fit."""
    left, right = {one.step: one for one in a}, {one.step: one for one in b}
    steps = sorted(left.keys() & right.keys())
    if len(steps) > MAX_STEPS_SHOWN:
        chosen = np.linspace(0, len(steps) - 1, MAX_STEPS_SHOWN).round().astype(int)
        steps = [steps[at] for at in chosen]
    pairs = [(left[step], right[step]) for step in steps]
    if not pairs and a and b:
        pairs = [(a[-1], b[-1])]
    return [_pass(one, other, k) for one, other in pairs for k in _common_ks(one, other)]


def _common_ks(a: Evaluation, b: Evaluation) -> list[str]:
    return [k for k in shown_of([a, b]) if k in a.pass_at_k and k in b.pass_at_k]


def _pass(a: Evaluation, b: Evaluation, k: str) -> PassDifference:
    paired = a.suite == b.suite and a.rows == b.rows and len(a.correct) == len(b.correct) > 0
    difference, low, high, p_value = b.pass_at_k[k] - a.pass_at_k[k], math.nan, math.nan, math.nan
    if paired:
        shares_a, shares_b = _problems(a, int(k)), _problems(b, int(k))
        change = paired_difference(shares_a, shares_b)
        difference, low, high = change.mean, change.low, change.high
        p_value = sign_flip_p(np.subtract(shares_b, shares_a))
    return PassDifference(
        max(a.step, b.step),
        k,
        a.pass_at_k[k],
        b.pass_at_k[k],
        paired,
        len(a.correct) if paired else 0,
        difference,
        low,
        high,
        p_value,
    )


def _problems(one: Evaluation, k: int) -> list[float]:
    return [pass_at_k(correct, one.samples_per_problem, k) for correct in one.correct]


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }


def _listed(values: Any) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]
