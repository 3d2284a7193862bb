"""Where a step's time goes, part by part."""

import contextlib
import time
from collections.abc import Iterator

from shared.spans import Facts, span


class Stopwatch:
    """`track` is where a profile shows the parts."""

    def __init__(self, track: str = "step") -> None:
        self.parts: dict[str, float] = {}
        self._track = track
        self._began_s = time.monotonic()

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began_s

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Facts]:
        """Add the seconds that the block takes to part `name`; gives what a profile tells of it."""
        began_s = time.monotonic()
        try:
            with span(name, self._track) as facts:
                yield facts
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began_s
