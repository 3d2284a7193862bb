"""What the curves show, in words that the numbers allow.

A rise or fall of pass@1 is claimed only by the sign-flip test at `LEVEL`, that of a curve over
steps only when its slope's 95 % interval excludes zero.
"""

import math

from services.trainer.report.evaluations import Comparison
from services.trainer.report.summary import Reward, Slope, Summary
from shared.statistics import LEVEL, Interval


def headline(summary: Summary) -> str:
    if summary.before_after is None:
        return f"{progress(summary)} {reward(summary)}"
    return f"{progress(summary)} {before_after(summary.before_after)}"


def progress(summary: Summary) -> str:
    planned = "" if summary.steps_planned is None else f" of {summary.steps_planned}"
    state = {
        "finished": "The job finished",
        "unfinished": "The job has not ended",
        "failed": "The job failed",
    }.get(summary.state, f"The job is {summary.state}")
    reason = f" ({summary.error})" if summary.error else ""
    return f"{state}{reason} after {summary.steps}{planned} steps in {duration(summary.wall_s)}."


def before_after(change: Comparison) -> str:
    values = (
        f"{share(change.pass_at_1_before)} at version {change.before_version} and "
        f"{share(change.pass_at_1_after)} at version {change.after_version} "
        f"({signed_share(change.difference)}, 95 % interval {signed_share(change.low)} to "
        f"{signed_share(change.high)}, paired over {change.num_problems} problems, sign-flip "
        f"p = {number(change.p_value)})"
    )
    if not change.is_significant:
        return f"Offline pass@1 was {values}: no change is shown (p above {LEVEL:g})."
    direction = "rose" if change.difference > 0 else "fell"
    return f"Offline pass@1 {direction}: {values}."


def reward(summary: Summary) -> str:
    return _reward("Online reward over all graded samples", summary.reward_raw) + (
        " Groups without variance are left out of training, so the reward of trained groups alone"
        " would be biased; both are drawn."
        if any(reason.startswith("no_variance") for reason in summary.groups.dropped)
        else ""
    )


def _reward(what: str, values: Reward) -> str:
    if values.slope.num_steps == 0:
        return f"{what}: no step has been taken yet."
    if values.slope.num_steps < 3:
        return f"{what}: {number(values.mean)}; too few steps for a trend."
    ends = f"from {_third(values.first, 'first')} to {_third(values.last, 'last')}"
    return f"{what} {_moved(values.slope, ends)}"


def _third(mean: Interval, which: str) -> str:
    interval = ""
    if math.isfinite(mean.low):
        interval = f", 95 % interval {number(mean.low)} to {number(mean.high)}"
    return f"{number(mean.mean)} (mean of the {which} third's {mean.num} steps{interval})"


def delta_logprob(summary: Summary) -> str:
    values = summary.delta_logprob
    if values.slope.num_steps == 0:
        return "No step has compared sampler and trainer yet."
    level = (
        f"Sampler and trainer gave the same sampled tokens log-probabilities that differ by "
        f"{number(values.mean)} on average (p99 {number(values.p99)}, at most "
        f"{number(values.max)})."
    )
    if summary.lag_max > 0:
        level += (
            f" Up to {counted(summary.lag_max, 'version')} of training came between the two, and"
            f" what changed in them is part of it."
        )
    above = f"{values.steps_above} of {values.slope.num_steps} steps were not"
    held = "every step was" if not values.steps_above else above
    level += f" With {values.bound_why} a step's mean should stay below {values.bound:g}: {held}."
    if values.pauses_above is not None:
        level += (
            f" That is what was measured for such settings, and ends no job; this one pauses when a"
            f" step's mean is above {values.pauses_above:g} (bounds.max_mean_abs_delta_logprob)."
        )
    if summary.route_bytes:
        level += (
            f" The sampler's choices came along, {number(summary.route_bytes / 1e6)} MB of them "
            f"({number(summary.route_bytes / max(1, summary.tokens_trained))} bytes a token)."
        )
    if values.slope.num_steps < 3:
        return f"{level} There are too few steps for a trend."
    return f"{level} Over the run the mean {_moved(values.slope, 'step by step')}"


def _moved(slope: Slope, ends: str) -> str:
    interval = (
        f"{signed(slope.per_step)} a step, 95 % interval {signed(slope.low)} to "
        f"{signed(slope.high)}, {slope.num_steps} steps"
    )
    if not slope.excludes_zero:
        return f"shows no trend: the slope's interval includes zero ({interval})."
    return f"{'rose' if slope.per_step > 0 else 'fell'} {ends} ({interval})."


def evaluations(summary: Summary) -> str:
    if not summary.evaluations:
        return "No evaluation has finished: only online numbers are known, and they are biased."
    last = summary.evaluations[-1]
    parts = [
        f"Evaluated: {counted(len(summary.evaluations), 'version')}, on {last.num_problems} "
        f"problems of {last.suite or 'the suite'}, {last.samples_per_problem} samples each."
    ]
    if summary.before_after is not None:
        parts.append(before_after(summary.before_after))
    if last.truncated_share is not None:
        parts.append(f"At the last one {percent(last.truncated_share)} of answers were cut off.")
    if last.skipped_problems:
        parts.append(f"{last.skipped_problems} problems were too long for the context and skipped.")
    return " ".join(parts)


def phases(summary: Summary) -> str:
    total = sum(summary.seconds_per_phase.values())
    if total <= 0:
        return "No step has been timed yet."
    name, seconds = max(summary.seconds_per_phase.items(), key=lambda item: item[1])
    return (
        f"A step took {number(summary.step_seconds_mean)} s on average. Most of it was "
        f"{name.replace('_', ' ')} ({percent(seconds / total)})."
    )


def lag(summary: Summary) -> str:
    if math.isnan(summary.lag_mean):
        return "No step has been taken yet."
    if summary.lag_max == 0:
        return "Every trained sample came from the version being trained: strictly on-policy."
    return (
        f"Trained samples were {number(summary.lag_mean)} versions behind on average, "
        f"{summary.lag_max:.0f} at most."
    )


def groups(summary: Summary) -> str:
    dropped = summary.groups.dropped
    reasons = ", ".join(f"{num} {reason.replace('_', ' ')}" for reason, num in dropped.items())
    return (
        f"{counted(summary.groups.trained, 'group')} "
        f"{'was' if summary.groups.trained == 1 else 'were'} trained, "
        f"{sum(dropped.values())} dropped{f' ({reasons})' if reasons else ''}, and "
        f"{counted(summary.groups.duplicates_refused, 'duplicate')} refused."
    )


def number(value: float | None) -> str:
    """Three significant digits, plain notation where people expect it."""
    if value is None or not math.isfinite(value):
        return "–"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def signed(value: float | None) -> str:
    text = number(value)
    return text if text.startswith(("-", "–")) else f"+{text}"


def share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def signed_share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:+.3f}"


def counted(num: float, what: str) -> str:
    """Such as "1 version", "2 versions"."""
    return f"{num:.0f} {what}" if num == 1 else f"{num:.0f} {what}s"


def percent(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
