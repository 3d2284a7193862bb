"""Where a step's time goes, part by part."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._began_s = time.monotonic()

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began_s

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to part `name`."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began_s
