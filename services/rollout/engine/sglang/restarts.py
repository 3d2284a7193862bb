"""How often a server was replaced of late: one that needs it again and again is given up."""

import time
from collections import deque

_WINDOW_S = 3600.0
_MOST = 5


class Restarts:
    """Those of the last hour that no version was proven after. `total` counts all for reports."""

    def __init__(self) -> None:
        self.total = 0
        self._at_s: deque[float] = deque(maxlen=_MOST)

    def note(self) -> None:
        self.total += 1
        self._at_s.append(time.monotonic())

    def forget(self) -> None:
        """A version was proven: what went before is over."""
        self._at_s.clear()

    def check(self) -> None:
        """RuntimeError when one more is too many."""
        if len(self._at_s) == _MOST and time.monotonic() - self._at_s[0] < _WINDOW_S:
            raise RuntimeError(
                f"SGLang was restarted {_MOST} times within {_WINDOW_S:g} s; giving up"
            )
