"""The demo's task: `37+48=` is answered with worked steps, `7+8=15;3+4+1=08;85`.

The answer is the last `;`-separated field and must be an integer without anything else around it;
the steps are the policy's own business. Anything else is `unparseable`.
"""

import re

from shared.messages import Score, Unparseable

MAX_DIGITS = 18

_INTEGER = re.compile(r"-?[0-9]+")


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 for the gold's integer, 0 for another. ValueError: gold is no integer."""
    expected = _read(gold.strip())
    if expected is None:
        raise ValueError(f"gold {gold[:80]!r} is not an integer of at most {MAX_DIGITS} digits")
    field = response.rpartition(";")[2]
    value = _read(field)
    if value is None:
        return Unparseable(reason=f"the last field is not an integer: {field[:40]!r}")
    return Score(value=float(value == expected), extracted=field)


def _read(text: str) -> int | None:
    if len(text) > MAX_DIGITS + 1 or not _INTEGER.fullmatch(text):
        return None
    return int(text)
