r"""AIME answers: an integer from 0 to 999, compared exactly.

The answer is found as for mathematics (`extraction.py`). `073`, `73`, `73.`, `73.0`, `73^\circ` and
`n = 73` are the same integer, on either side. Another number is wrong (0); text that is no number,
such as an unevaluated `\frac{146}{2}`, is `unparseable`: the task asks for the integer.
"""

import re
from functools import lru_cache

from services.reward.graders.extraction import NoAnswer, find_answer
from services.reward.graders.literals import Number, read_number
from services.reward.graders.notation import tidy
from shared.messages import Score, Unparseable

MAX_ANSWER = 999
MAX_CHARS = 4000

_UNIT = re.compile(r"(?<=\d)(?:\\degree|\\(?:text|mathrm|mbox)\{[^{}]*\}| ?[A-Za-z]{3,})$")


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 for the gold's integer, 0 for another number. ValueError: gold is no integer 0 to 999."""
    expected = _read_gold(gold)
    try:
        found = find_answer(response)
    except NoAnswer as err:
        return Unparseable(reason=str(err))
    number = _read(found.text)
    if number is None:
        return Unparseable(reason=f"not a number: {found.text[:80]!r}")
    is_right = number.value == expected
    out_of_range = number.value is None or not 0 <= number.value <= MAX_ANSWER
    is_integer = number.value is not None and number.value.denominator == 1
    reason = "" if is_integer and not out_of_range else ", not an integer from 0 to 999"
    return Score(value=float(is_right), extracted=found.text[:80], reason=found.rule + reason)


@lru_cache(maxsize=512)
def _read_gold(gold: str) -> int:
    number = _read(gold)
    if number is None or number.value is None or number.value.denominator != 1:
        raise ValueError(f"gold {gold[:80]!r} is not an integer")
    if not 0 <= number.value <= MAX_ANSWER:
        raise ValueError(f"gold {gold[:80]!r} is not from 0 to {MAX_ANSWER}")
    return int(number.value)


def _read(text: str) -> Number | None:
    if len(text) > MAX_CHARS:
        return None
    value = tidy(text).rpartition("=")[2]
    number = read_number(_UNIT.sub("", value).strip())
    return number if number is not None and number.digits else None
