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

    slope: Interval
    p_value: float
    line: LinearFit
    num_evaluations: int
    num_problems: int


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
    return Trend(slope, sign_flip_p(slopes_P), line, len(x), shares_EP.shape[1])


def describe_trend(found: Trend | None) -> str:
    """One sentence for people."""
    if found is None:
        return "no trend: it takes two evaluations at different steps"
    slope = found.slope
    per_100 = [100 * value for value in (slope.mean, slope.low, slope.high)]
    verdict = "no trend is shown"
    if found.p_value <= LEVEL and not math.isnan(slope.mean):
        verdict = "rising" if slope.mean > 0 else "falling"
    return (
        f"{verdict}: {per_100[0]:+.3f} per 100 steps [{per_100[1]:+.3f}, {per_100[2]:+.3f}] over "
        f"{found.num_evaluations} evaluations of {found.num_problems} problems"
    )
