r"""What is not worth evaluating: refused by its looks, in microseconds.

Golds of MATH-500 and DeepMath have at most 161 characters and three levels of brackets, so the
bounds leave an order of magnitude. What passes may still run for ever; the pool sees to that.
"""

import math
import re

from services.reward.graders.brackets import nesting
from services.reward.graders.forms import Unreadable

MAX_CHARS = 500
MAX_NESTING = 12
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 5_000
MAX_BINOMIAL = 100_000

_CARET = re.compile(r"\^\s*(\{|\d+|.)?")
_POWER_OF_POWER = re.compile(r"\^[^()]*\)[)}\s]*\^")
_HEIGHT = re.compile(r"\^\s*\{?\s*(\d{1,9})")
_INTEGER_POWER = re.compile(r"\s*(\d{1,6})\s*\^\s*(?:\{\s*(\d{1,6})\s*\}|(\d))\s*")
_FACTORIAL = re.compile(r"(\d*)([)}]?)\s*(!+)")
_POWER_OF_NUMBER = re.compile(r"\d[)}]?\s*\^\s*$")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{([^{}]*)\}")
_DIGITS = re.compile(r"\d+")


class TooLarge(Exception):
    """Evaluating it would take for ever: `9^{9^{9}}`. The text names the culprit."""


def screen(text: str) -> None:
    """Raise `TooLarge` for towers, huge exponents, factorials and binomials.

    `Unreadable` for what is too long or too deep to be an answer.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"an expression of {len(text)} characters exceeds {MAX_CHARS}")
    if nesting(text) > MAX_NESTING:
        raise Unreadable(f"an expression nested deeper than {MAX_NESTING}")
    _screen_factorials(text)
    _screen_powers(text)
    for match in _BINOMIAL.finditer(text):
        if "^" in match[1] or _has_number_above(match[1], MAX_BINOMIAL):
            raise TooLarge(f"binomial of {match[1][:20]}")


def _screen_factorials(text: str) -> None:
    for match in _FACTORIAL.finditer(text):
        literal, bracket, marks = match.groups()
        begin = _opening(text, match.start(2)) if bracket else match.start()
        operand = text[begin : match.start(2)] if bracket else literal
        is_power = bool(bracket) and any(sign in operand for sign in "^!")
        is_power |= _POWER_OF_NUMBER.search(text[max(0, begin - 12) : begin]) is not None
        if len(marks) > 2 or is_power or _has_number_above(operand, MAX_FACTORIAL):
            raise TooLarge(f"factorial {match.group()[:20]}")


def _screen_powers(text: str) -> None:
    for match in _CARET.finditer(text):
        exponent, end = match[1] or "", match.end()
        if exponent == "{":
            end = _closing(text, match.end() - 1)
            exponent = text[match.end() : end]
        behind = text[end:].removeprefix("}").lstrip()
        if behind.startswith("^") or _exponent_exceeds(exponent):
            raise TooLarge(f"exponent {exponent[:20]}")
    if _POWER_OF_POWER.search(text):  # (x^2)^3 is none too many, ((9^9)^9)^9 is
        heights = [int(match[1]) for match in _HEIGHT.finditer(text)]
        if math.prod(heights) > MAX_EXPONENT:
            raise TooLarge(f"powers of powers: {text[:20]}")


def _exponent_exceeds(exponent: str) -> bool:
    power = _INTEGER_POWER.fullmatch(exponent)
    if power is not None:
        base, height = int(power[1]), int(power[2] or power[3])
        return height * math.log10(max(base, 1)) > math.log10(MAX_EXPONENT)
    has_symbols = re.search(r"[a-zA-Z]", re.sub(r"\\[a-z]+", "", exponent))
    is_tower = "^" in exponent and not has_symbols
    return is_tower or _has_number_above(exponent, MAX_EXPONENT)


def _has_number_above(text: str, bound: int) -> bool:
    return any(len(digits) > 9 or int(digits) > bound for digits in _DIGITS.findall(text))


def _closing(text: str, begin: int) -> int:
    """Place of the brace that closes the one at `begin`, or the end."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def _opening(text: str, end: int) -> int:
    """Place of the bracket that the one at `end` closes, or the beginning."""
    depth = 0
    for place in range(end, -1, -1):
        depth += {")": 1, "}": 1, "(": -1, "{": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return 0
