"""How long the check that runs may take: graders that divide their time ask here.

Set by the worker before each check. The limit itself is enforced from outside.
"""

DEFAULT_S = 5.0

_current_s = DEFAULT_S


def current_s() -> float:
    """Seconds of wall clock for the whole check."""
    return _current_s


def set_current(seconds: float) -> None:
    global _current_s  # a worker does one check at a time
    _current_s = seconds
