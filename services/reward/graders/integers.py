r"""Whole numbers, compared exactly: what AIME, GSM8K and DAPO have for answers.

The answer is found as for mathematics (`extraction.py`). `073`, `73.`, `73.0`, `73^\circ`, `1,234`,
`$73`, `73 apples`, `73 thousand` (73000), `n = 73` and `m + n = 73` are integers, on either side;
`13 = 14`, `2n = 73`, `n >= 73` and `a = 13, b = 73` are none (`equations.py`). Another number is
wrong (0), `73 squared` for instance; text that is no number, such as an unevaluated
`\frac{146}{2}`, is `unparseable`: the task asks for the integer.
"""

import re
from functools import lru_cache

from services.reward.graders.equations import is_name, sides
from services.reward.graders.extraction import NoAnswer, find_answer
from services.reward.graders.literals import (
    Number,
    is_changed_by,
    is_remark,
    read_number,
    scaled,
)
from services.reward.graders.notation import tidy
from shared.messages import Score, Unparseable

MAX_CHARS = 4000

_UNIT = re.compile(
    r"(?<=\d)(?:\\degree|\\percent|\\?\$"
    r"| ?\\(?:text|mathrm|mbox)\{([^{}]*)\}| ?([A-Za-z]{3,}(?: [a-z]+)*))$"
)
# Numbers and what joins them: a sum that was worked out.
_NUMERIC = re.compile(
    r"(?:[\d\s.+\-/^!(){}$]|\\(?:frac|cdot|times|div|sqrt|binom|degree)(?![a-zA-Z])|\\\$)+"
)
_TEXT = re.compile(r"^\\(?:text|mathrm|mbox|mathbf|textbf)\s*\{([^{}]*)\}$")
_CURRENCY = re.compile(r"^([-+]?)(?:\\?\$|€|£) ?")


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 for the gold's integer, 0 for another number. ValueError: the gold is no integer."""
    return grade_integer(response, gold)


def grade_integer(
    response: str, gold: str, *, low: int | None = None, high: int | None = None
) -> Score | Unparseable:
    """`low` and `high` bound what an answer can be; a gold beyond them is unusable."""
    expected = _read_gold(gold, low, high)
    try:
        found = find_answer(response)
    except NoAnswer as err:
        return Unparseable(reason=str(err))
    number = _read(found.text)
    if number is None and _is_changed(found.text):
        return Score(value=0.0, extracted=found.text[:80], reason=f"{found.rule}, another number")
    if number is None:
        return Unparseable(reason=f"not a number: {found.text[:80]!r}")
    if _same(number, expected):
        return Score(value=1.0, extracted=found.text[:80], reason=found.rule)
    reason = "" if _is_possible(number, low, high) else f", not an integer{_range(low, high)}"
    return Score(value=0.0, extracted=found.text[:80], reason=found.rule + reason)


@lru_cache(maxsize=512)
def _read_gold(gold: str, low: int | None, high: int | None) -> Number:
    number = _read(gold)
    if number is None or not _is_possible(number, None, None):
        raise ValueError(f"gold {gold[:80]!r} is not an integer")
    if not _is_possible(number, low, high):
        raise ValueError(f"gold {gold[:80]!r} is not{_range(low, high)}")
    return number


def _same(number: Number, expected: Number) -> bool:
    if number.value is None or expected.value is None:  # thousands of digits
        return number.digits == expected.digits
    return number.value == expected.value


def _is_possible(number: Number, low: int | None, high: int | None) -> bool:
    if number.value is None:
        return low is None and high is None
    return (
        number.value.denominator == 1
        and (low is None or number.value >= low)
        and (high is None or number.value <= high)
    )


def _range(low: int | None, high: int | None) -> str:
    return "" if low is None and high is None else f" from {low} to {high}"


def _read(text: str) -> Number | None:
    if len(text) > MAX_CHARS:
        return None
    text = tidy(text)
    chain = sides(text) if "=" in text else [text]
    if not chain:
        return None
    *earlier, value = chain
    number = read_number(_bare(value))
    if number is None or not number.digits:
        return None
    others = [read_number(_bare(side)) for side in earlier]
    if any(one is not None and not _same(one, number) for one in others):
        return None
    is_said = not earlier or is_name(earlier[0]) or _NUMERIC.fullmatch(earlier[0])
    return number if is_said else None


def _bare(side: str) -> str:
    """Without unit and currency; a number word counts."""
    side = _CURRENCY.sub(r"\1", _TEXT.sub(r"\1", side.strip()))
    unit = _UNIT.search(side)
    if unit is None:
        return side.strip()
    value, words = scaled(side[: unit.start()], unit[1] or unit[2] or "")
    return side if is_changed_by(words) or is_remark(words) else value.strip()


def _is_changed(text: str) -> bool:
    """Whether it is a number with words that make it another: "5 squared", "5 and a half"."""
    if len(text) > MAX_CHARS:
        return False
    unit = _UNIT.search(tidy(text))
    return unit is not None and is_changed_by(unit[1] or unit[2] or "")
