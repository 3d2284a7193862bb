"""A run as the dashboard first sees it: few enough points for a screen, however long the run is.

The file is read once and then only what was added, so that a page of 10,000 steps costs one answer
of a bounded size. Steps are thinned to means over equally many steps; nothing else of them is lost.
"""

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

MAX_STEPS = 1000
KEPT_EVENTS = 60
KEPT_UPDATES = 48
KEPT_RUNS = 8

# One per group or more: counted for an overview, but thousands of them are of no use to a page.
_BULK = frozenset({"group_sampled", "group_graded", "group_dropped", "duplicate_refused"})
_UPDATES = frozenset({"update_committed", "update_failed"})
_SUMMED = frozenset({"groups", "samples", "tokens", "response_tokens"})


class Overview:
    """What is known of one run so far; `read_more` before `document`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0
        self._counts: Counter[str] = Counter()
        self._dropped: dict[str, str] = {}
        self._steps: dict[int, dict[str, Any]] = {}
        self._evals: dict[tuple[str, int], dict[str, Any]] = {}
        self._jobs: dict[str, dict[str, Any]] = {}
        self._updates: deque[dict[str, Any]] = deque(maxlen=KEPT_UPDATES)
        self._others: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)

    def read_more(self) -> None:
        """Take in what the file has gained; a line that is being written waits for its end."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._num_lines += 1
                self._take(line)

    def document(self, *, max_steps: int = MAX_STEPS) -> dict[str, Any]:
        """`after` is the number of lines covered; the stream goes on from there."""
        steps = [self._steps[step] for step in sorted(self._steps)]
        events = [
            *self._jobs.values(),
            *thinned(steps, max_steps),
            *self._evals.values(),
            *self._updates,
            *self._others,
        ]
        return {
            "after": self._num_lines,
            "num_steps": len(steps),
            "events": sorted(events, key=lambda event: float(event["at_s"])),
            "counts": dict(self._counts),
            "dropped": dict(Counter(self._dropped.values()).most_common()),
        }

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            name, fields = str(event["name"]), event["fields"]
            float(event["at_s"])
            self._counts[name] += 1
            if name == "step":
                self._steps[int(fields["step"])] = event
            elif name == "group_dropped":
                self._dropped[str(fields["group_id"])] = str(fields["reason"])
            elif name == "eval_finished":
                key = (str(fields.get("suite")), int(fields["policy_version"]))
                self._evals[key] = event
            elif name in ("job_started", "job_finished"):
                self._jobs.pop(name, None)
                self._jobs[name] = event
            elif name in _UPDATES:
                self._updates.append(event)
            elif name not in _BULK:
                self._others.append(event)
        except (ValueError, KeyError, TypeError):
            return  # a line that a crash tore


class Overviews:
    """Of the runs that were looked at last; calls may come from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, Overview] = OrderedDict()
        self._lock = Lock()

    def document(self, path: Path) -> dict[str, Any]:
        with self._lock:
            known = self._known.setdefault(path, Overview(path))
            self._known.move_to_end(path)
            if len(self._known) > KEPT_RUNS:
                self._known.popitem(last=False)
            known.read_more()
            return known.document()


def thinned(steps: Sequence[dict[str, Any]], max_steps: int) -> list[dict[str, Any]]:
    """At most `max_steps` events: each stands for equally many steps and bears the last's number.

    Numbers are means, largest values stay the largest, counts are sums; what is no number is the
    last step's.
    """
    width = math.ceil(len(steps) / max_steps) if steps else 1
    if width == 1:
        return list(steps)
    return [_merged(steps[at : at + width]) for at in range(0, len(steps), width)]


def _merged(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = steps[-1]
    fields = [step["fields"] for step in steps]
    merged = {name: _merge(name, [one.get(name) for one in fields]) for name in last["fields"]}
    merged |= {"step": last["fields"]["step"], "num_steps": len(steps)}
    merged["policy_version"] = last["fields"].get("policy_version")
    return {**last, "fields": merged}


def _merge(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[-1], Mapping):
        maps = [value for value in values if isinstance(value, Mapping)]
        keys = dict.fromkeys(key for one in maps for key in one)
        if name == "lag_tokens":
            return {key: sum(one.get(key, 0) for one in maps) for key in keys}
        return {key: _mean([one.get(key) for one in maps]) for key in keys}  # seconds, backlogs
    numbers = [value for value in values if isinstance(value, int | float)]
    if numbers and name in _SUMMED:
        return sum(numbers)
    return max(numbers) if numbers and name.endswith("_max") else _mean(values)


def _mean(values: Sequence[Any]) -> Any:
    """Of the numbers; what is no number is the last one's."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers or isinstance(values[-1], bool):
        return values[-1]
    return sum(numbers) / len(numbers)
