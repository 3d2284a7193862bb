"""Reading a run's events.jsonl: one Event a line, in the order the conductor wrote them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shared.messages import Event

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of one run; a line that a crash tore is counted, not guessed."""

    events: list[Event]
    num_lines: int
    num_unreadable: int

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


def read_events(path: Path) -> RunEvents:
    """Read a possibly growing file; without a file there are no events."""
    whole_lines, _, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    lines = whole_lines.splitlines()
    events: list[Event] = []
    for line in lines:
        try:
            events.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return RunEvents(events, len(lines), len(lines) - len(events))


def dropped_by_reason(run: RunEvents) -> dict[str, int]:
    """Number of groups by drop reason; a group that a restart drops again counts once."""
    reasons = {
        str(event.fields["group_id"]): str(event.fields["reason"])
        for event in run.named("group_dropped")
    }
    return dict(Counter(reasons.values()).most_common())
