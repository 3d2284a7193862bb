"""A job as a terminal shows it: a block that is redrawn, or one line a step where nobody looks.

Both are fed by the job's events alone.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared.messages import Event
from shared.registry import Replica

AVERAGE_STEPS = 10

_COLOURS = {
    "serving": "green", "finished": "green", "running": "green", "active": "green",
    "failed": "red", "stopped": "red", "paused": "yellow", "cancelled": "yellow",
}  # fmt: skip


class JobView:
    """What is known of a job so far."""

    def __init__(self, job_id: str, *, steps: int | None = None) -> None:
        self.job_id = job_id
        self.state = "queued"
        self.error: str | None = None
        self.steps = steps
        self.step: Mapping[str, Any] = {}
        self.evaluation: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=AVERAGE_STEPS)
        self._began_s = time.monotonic()

    def apply(self, event: Event) -> str | None:
        """Take an event in; returns the line that tells it, if it is worth one."""
        fields = event.fields
        match event.name:
            case "job_started":
                return self._started(fields)
            case "step":
                self.state = "running"
                self.step = fields
                if isinstance(fields.get("reward_raw"), int | float):
                    self._rewards.append(fields["reward_raw"])
                return self._step_line()
            case "eval_finished":
                self.evaluation = fields
                return f"evaluation  {self.evaluation_text()}"
            case "job_finished" | "job_paused" | "job_resumed":
                fallback = {"job_paused": "paused", "job_resumed": "running"}.get(event.name)
                self.state = str(fields.get("state") or fallback or "finished")
                self.error = fields.get("error") or fields.get("reason")
                return f"{self.job_id} {self.state}{f': {self.error}' if self.error else ''}"
            case "rollback_started" | "rollback_ended" | "rollback_failed":
                return self._rollback(event.name, fields)
            case (
                "eval_failed"
                | "eval_moved"
                | "update_failed"
                | "engine_not_started"
                | "rank_restarted"
                | "replayed"
            ):
                told = " ".join(f"{name}={value}" for name, value in fields.items())
                return f"{event.name.replace('_', ' ')}  {told}"
        return None

    def _started(self, fields: Mapping[str, Any]) -> str:
        """A job that nobody ended and that starts again: its trainer died, or was stopped."""
        was_running, self.state = self.state == "running", "running"
        self.steps = dict(fields.get("job") or {}).get("steps", self.steps)
        if not (was_running or fields.get("step")):
            return f"{self.job_id} started"
        goes_on = f"{self.job_id} goes on after step {fields.get('step') or 0}"
        return f"the trainer was restarted; {goes_on}" if was_running else goes_on

    def _rollback(self, name: str, fields: Mapping[str, Any]) -> str:
        """A step under way still changes which version ends it: the job's status knows."""
        version, current = fields.get("policy_version"), fields.get("current_version")
        if name == "rollback_started":
            return (
                f"version {version} is served by a rollback: training waits until it is ended "
                f"(`tandem status {self.job_id}` says how)"
            )
        ended = "has ended" if name == "rollback_ended" else f"failed: {fields.get('error')}"
        goes_on = f"; training goes on with version {current}" if current is not None else ""
        return f"the rollback to version {version} {ended}{goes_on}"

    @property
    def done(self) -> int:
        return int(self.step.get("step") or 0)

    @property
    def reward_average(self) -> float:
        return fmean(self._rewards) if self._rewards else math.nan

    def evaluation_text(self) -> str:
        if not self.evaluation:
            return "none yet"
        one = dict(self.evaluation.get("pass_at_k") or {}).get("1")
        interval = self.evaluation.get("pass_at_1_ci")
        bounds = f" [{share(interval[0])}, {share(interval[1])}]" if interval else ""
        truncated = self.evaluation.get("truncated_share")
        cut = "" if truncated is None else f", truncated {100 * truncated:.0f} %"
        return f"version {self.evaluation.get('policy_version')}: pass@1 {share(one)}{bounds}{cut}"

    def block(self, servers: Sequence[Replica], notes: Mapping[str, str]) -> RenderableType:
        """The redrawn block; `notes` are further rows, for instance the dashboard's address."""
        head = Table.grid(padding=(0, 2))
        elapsed = f"{time.monotonic() - self._began_s:.0f} s"
        head.add_row(
            Text(self.job_id, style="bold"),
            Text(self.state, style=_COLOURS.get(self.state, "yellow")),
            ProgressBar(total=self.steps or 1, completed=self.done, width=30),
            f"{self.done}/{self.steps or '?'}",
            Text(elapsed, style="dim"),
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column()
        shown = {**self._rows(), "servers": _servers(servers), **notes}
        for name, text in shown.items():
            rows.add_row(name, text)
        return Group(head, rows)

    def _rows(self) -> dict[str, Any]:
        step = self.step
        average = f"(mean of {AVERAGE_STEPS} steps: {number(self.reward_average)})"
        return {
            "reward": f"{number(step.get('reward_raw'))} {average}",
            "|Δ log p|": f"{number(step.get('delta_logprob_mean'))} mean, "
            f"{number(step.get('delta_logprob_p99'))} p99",
            "lag": f"{number(step.get('lag_mean'))} mean, {number(step.get('lag_max'))} at most",
            "tokens/s": number(step.get("tokens_per_s")),
            "evaluation": self.evaluation_text(),
        }

    def _step_line(self) -> str:
        step = self.step
        return (
            f"step {self.done:>4}/{self.steps or '?'}"
            f"  reward {number(step.get('reward_raw')):>6} (avg {number(self.reward_average):>6})"
            f"  |Δ log p| {number(step.get('delta_logprob_mean')):>7}"
            f"  lag {number(step.get('lag_mean')):>4}"
            f"  {number(step.get('tokens_per_s')):>6} tok/s"
        )


def _servers(servers: Sequence[Replica]) -> Text:
    text = Text()
    for server in servers:
        version = "" if server.policy_version is None else f" v{server.policy_version}"
        text.append(f"{server.name} ")
        text.append(server.state.replace("_", " "), style=_COLOURS.get(server.state, "yellow"))
        text.append(f"{version}   ")
    return text if servers else Text("not known yet", style="dim")


def number(value: Any) -> str:
    """Three significant digits; what is missing is a dash."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: Any) -> str:
    """A share with three decimals, so that columns and intervals line up."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.3f}" if known else "–"
