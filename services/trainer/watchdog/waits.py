"""Whom this rank waits for outside of collectives, for the watchdog.

Transfers between pipeline stages are sends and receives, which the flight recorder keeps for NCCL
only, and under names of their own.
"""

import contextlib
from collections.abc import Iterator, Sequence

_NOBODY: tuple[str, tuple[int, ...]] = ("", ())
_current = _NOBODY


@contextlib.contextmanager
def waiting(call: str, ranks: Sequence[int]) -> Iterator[None]:
    """`ranks` of the world are needed until the block is left."""
    global _current  # one main thread waits; the beacon's thread reads
    _current = (call, tuple(ranks))
    try:
        yield
    finally:
        _current = _NOBODY


def now() -> tuple[str, tuple[int, ...]]:
    """The call, empty for none, and the ranks that it needs."""
    return _current
