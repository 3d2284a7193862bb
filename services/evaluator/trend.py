"""Do the versions of a run get better? A straight line through its evaluations, with an interval.

Single evaluations are noisy; a slope uses all of them. The same problems are asked every time, so
the mean's slope is the mean of the problems' slopes, and its interval resamples problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.evaluator.statistics import Array, Interval, clustered_intervals
from shared.statistics import LEVEL, LinearFit, linear_fit, sign_flip_p


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope` is per unit of x (a step), over problems; `line` treats the means as points."""

    span: float  # of x: how many steps lie between the first and the last
    slope: Interval
    p_value: float
    line: LinearFit
    num_evaluations: int
    num_problems: int
    num_repeated: int = 0  # evaluations that are not in it: they have the samples of one that is


def trend(x_E: Sequence[float], shares_EP: Array) -> Trend | None:
    """The trend of E evaluations of P problems (pass@1 of each); None below two different x.

    A problem's slope carries the noise of its samples and of its having been drawn: the interval is
    about both, and does not need means that scatter about the line independently.
    """
    x = np.asarray(x_E, np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or shares_EP.shape[1] == 0:
        return None
    centred_E = x - x.mean()
    slopes_P = centred_E @ shares_EP / float(centred_E @ centred_E)
    (slope,) = clustered_intervals(slopes_P[:, None])
    line = linear_fit(shares_EP.mean(1), x)
    return Trend(float(np.ptp(x)), slope, sign_flip_p(slopes_P), line, len(x), shares_EP.shape[1])


def describe_trend(found: Trend | None) -> str:
    """One sentence for people: what the line rises over the steps that were seen, in points (1 % of
    all problems), and nothing beyond them."""
    if found is None:
        return "no trend: it takes two evaluations at different steps"
    slope = found.slope
    points = [100 * found.span * value for value in (slope.mean, slope.low, slope.high)]
    verdict = "no trend is shown"
    if found.p_value <= LEVEL and not math.isnan(slope.mean):
        verdict = "rising" if slope.mean > 0 else "falling"
    repeated = f" ({found.num_repeated} with the same samples left out)"
    return (
        f"{verdict}: pass@1 {points[0]:+.1f} points over {found.span:g} steps (95 % interval "
        f"{points[1]:+.1f} to {points[2]:+.1f}, p = {found.p_value:.4f}), by the line through "
        f"{found.num_evaluations} evaluations of {found.num_problems} problems"
        f"{repeated if found.num_repeated else ''}"
    )
