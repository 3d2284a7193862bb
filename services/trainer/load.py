"""How busy each stage was during one step: the part of a `step` event that says who waits for whom.

Counted from the events of samplers and graders as they pass; queues and slots are as they stand.
"""

import time
from collections import Counter
from typing import Any

from shared.messages import Event


class LoadMeter:
    """`note` every event; `take` what came since the last time."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._graded: Counter[str] = Counter()
        self._since_s = time.monotonic()

    def note(self, event: Event) -> None:
        if event.name == "group_sampled":
            self._tokens[event.replica] += _count(event.fields.get("tokens"))
        elif event.name == "group_graded":
            outcomes = event.fields.get("outcomes")
            numbers = outcomes.values() if isinstance(outcomes, dict) else ()
            self._graded[event.replica] += sum(_count(number) for number in numbers)

    def take(self) -> dict[str, dict[str, float]]:
        """Per second since the last call: sampled tokens and graded samples, by replica."""
        now_s = time.monotonic()
        seconds = max(now_s - self._since_s, 1e-6)
        found = {
            "sampled_tokens_per_s": _rates(self._tokens, seconds),
            "graded_per_s": _rates(self._graded, seconds),
        }
        self._tokens.clear()
        self._graded.clear()
        self._since_s = now_s
        return found


def _count(told: object) -> int:
    """What others tell may be anything; what is no number of things counts as none."""
    return told if isinstance(told, int) else 0


def _rates(counts: Counter[str], seconds: float) -> dict[str, float]:
    return {name: round(number / seconds, 3) for name, number in sorted(counts.items())}


def step_load(
    rates: dict[str, dict[str, float]], *, backlog: dict[str, int], num_open: int, slots: int
) -> dict[str, Any]:
    """Fields of the `step` event."""
    return {**rates, "backlog": backlog, "open_groups": num_open, "slots": slots}
