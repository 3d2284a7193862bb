r"""Whether two single values are equal: math-verify reads them, and numbers decide where they can.

Gold comes first everywhere, because math-verify's `verify` is not symmetric. Its own tests accept
1/2^98 for 1/2^99 (an absolute tolerance) and can simplify for minutes, so expressions are compared
by value at fixed points, relatively; sets, relations and matrices are left to `verify`.
Loaded in pool workers only: sympy is heavy, and what it is asked here may never end.
"""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, Float, MatrixBase, Rational

from services.reward.graders.forms import Leaf, Unreadable
from services.reward.graders.literals import is_rounding
from services.reward.graders.screen import TooLarge, screen

# It warns that we impose the deadline ourselves, and about each answer that it cannot read.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_SYMBOLS = 8
DIGITS = 30
TOLERANCE = Float("1e-15", DIGITS)
# Values that close are compared again, unless a decimal or a quadrature allows no more digits.
FINE_DIGITS = 130
FINE_TOLERANCE = Float("1e-110", DIGITS)
_INEXACT = (Float, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)

# Where expressions with symbols are compared: no special values, so that equality is no accident.
_POSITIVE = ("1.2345678910111213", "0.7182818284590452", "3.3166247903553998")
_MIXED = ("-1.4142135623730950", "0.5772156649015328", "-2.6457513110645905")

_TURNED = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?)\s*[({]?\s*(\d+(?:\.\d+)?)\\degree\s*[)}]?"
)
_DOUBLE_FACTORIAL = re.compile(r"(?<![\d.])(\d{1,3})!!(?!!)")
_CONFIG = [LatexExtractionConfig()]


def same_value(gold: Leaf, answer: Leaf) -> bool:
    """Whether `answer` has the value of `gold`.

    Raises `Unreadable` for an answer that cannot be parsed, `TooLarge` for one that is not worth
    trying, and ValueError for a gold that is either.
    """
    screen(answer.value)
    right = _read_leaf(answer)
    if right is None:
        raise Unreadable(f"not an expression: {answer.value[:80]!r}")
    try:
        left = _read_leaf(gold) if _is_exponential(gold) else _read_gold(gold.value)
    except ValueError:
        if answer.number is not None:
            return False  # whatever the gold means, it is no plain number
        raise
    if _is_undefined(right) or _is_undefined(left):
        return False
    if isinstance(left, Expr) and isinstance(right, Expr):
        verdict = _same_expression(left, right, gold, answer)
        if verdict is not None:
            return verdict
    return bool(verify(left, right, timeout_seconds=None))


def _read_leaf(leaf: Leaf) -> Basic | MatrixBase | None:
    """math-verify takes 1e-40 for a multiple of Euler's number."""
    if _is_exponential(leaf):
        assert leaf.number is not None
        assert leaf.number.value is not None
        return Rational(leaf.number.value.numerator, leaf.number.value.denominator)
    return read_expression(leaf.value)


def _is_exponential(leaf: Leaf) -> bool:
    return leaf.number is not None and leaf.number.value is not None and "e" in leaf.value.lower()


def same_by_verify(gold: str, answer: str) -> bool:
    """`verify` on whole texts, for shapes that differ: an interval against an inequality."""
    screen(answer)
    right = read_expression(answer)
    if right is None:
        raise Unreadable(f"not an expression: {answer[:80]!r}")
    left = _read_gold(gold)
    return bool(verify(left, right, allow_set_relation_comp=True, timeout_seconds=None))


def _read_gold(text: str) -> Basic | MatrixBase:
    refuse_large_gold(text)
    expression = read_expression(text)
    if expression is None:
        raise ValueError(f"gold {text[:80]!r} is not an expression")
    return expression


def refuse_large_gold(text: str) -> None:
    """ValueError for a gold that is compared as text or not at all."""
    try:
        screen(text)
    except (TooLarge, Unreadable) as err:
        raise ValueError(f"gold {text[:80]!r} is too large to evaluate: {err}") from err


@lru_cache(maxsize=512)  # the gold is the same for every sample of a group
def read_expression(text: str) -> Basic | MatrixBase | None:
    """What math-verify makes of LaTeX; None when it cannot."""
    latex = _TURNED.sub(r"\1(\\frac{\2\\pi}{180})", text).replace("\\degree", "")
    latex = latex.replace("\\percent", "\\%").replace("\\cr", "\\\\")
    latex = _DOUBLE_FACTORIAL.sub(_double_factorial, latex)
    found = parse(f"${latex}$", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return _with_imaginary_unit(found[0]) if found else None


def _double_factorial(match: re.Match[str]) -> str:
    """5!! is 5 * 3 * 1; math-verify takes it for (5!)!."""
    return f"({math.prod(range(int(match[1]), 0, -2))})"


def _with_imaginary_unit(value: Basic | MatrixBase) -> Basic | MatrixBase:
    """math-verify reads `i` as a symbol, of which i^2 = -1 does not hold."""
    if not isinstance(value, Expr):
        return value
    return value.xreplace({s: sympy.I for s in value.free_symbols if str(s) == "i"})


def _is_undefined(value: Basic | MatrixBase) -> bool:
    return value in {sympy.nan, sympy.zoo}


def _same_expression(left: Expr, right: Expr, gold: Leaf, answer: Leaf) -> bool | None:
    """True or False when values at fixed points tell, None when they cannot."""
    left, right = left.doit(), right.doit()  # math-verify leaves 10^{100}+1 as it is written
    if isinstance(left, Rational) and isinstance(right, Rational):
        return bool(left == right) or _rounds(gold, answer, left, right)
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if len(symbols) > MAX_SYMBOLS:
        return None
    if not symbols:
        pair = _values(left, right, {})
        return None if pair is None else _same_at(left, right, {}) or _rounds(gold, answer, *pair)
    return _same_function(left, right, symbols)


def _same_function(left: Expr, right: Expr, symbols: list[Any]) -> bool | None:
    """Equal at positive points, and at mixed ones as far as both are real there.

    A root of a negative number picks a branch: 1/sqrt(n) and sqrt(1/n) are the same answer, while
    |x| and x are not.
    """
    for points, must_be_real in ((_POSITIVE, False), (_MIXED, True)):
        for shift in range(len(points)):
            at = {s: Rational(points[(i + shift) % 3]) + i // 3 for i, s in enumerate(symbols)}
            pair = _values(left, right, at)
            if pair is None:
                return None
            if must_be_real and not (pair[0].is_real and pair[1].is_real):
                continue
            if not _same_at(left, right, at):
                return False
    return True


def _same_at(left: Expr, right: Expr, at: dict[Any, Any]) -> bool:
    """Whether values that exist are equal: e^{pi sqrt(163)} is an integer for thirty digits."""
    pair = _values(left, right, at)
    if pair is None or not _close(*pair):
        return False
    if left == right or left.has(*_INEXACT) or right.has(*_INEXACT):
        return True
    pair = _values(left, right, at, digits=FINE_DIGITS)
    return pair is None or _close(*pair, tolerance=FINE_TOLERANCE)


def _values(
    left: Expr, right: Expr, at: dict[Any, Any], *, digits: int = DIGITS
) -> tuple[Expr, Expr] | None:
    """Both values to so many digits; None when one of them is not a number."""
    values = []
    for expression in (left, right):
        value = _value(expression, at, digits)
        if value is None:
            return None
        values.append(value)
    return values[0], values[1]


def _value(expression: Expr, at: dict[Any, Any], digits: int) -> Expr | None:
    try:
        value = expression.evalf(digits, subs=at) if at else expression.evalf(digits)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None  # not a quantity: a function without a definition, a set inside
    if not isinstance(value, Expr) or not value.is_number or not value.is_finite:
        return None
    real, imaginary = value.as_real_imag()
    return None if not (real.is_Number and imaginary.is_Number) else _significant(value)


def _significant(value: Expr) -> Expr:
    """Zero for a value that is nothing but the noise of cancellation (sympy marks it so)."""
    return sympy.Integer(0) if getattr(value, "_prec", DIGITS) == 1 else value


def _close(left: Expr, right: Expr, *, tolerance: Float = TOLERANCE) -> bool:
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


def _rounds(gold: Leaf, answer: Leaf, left: Expr, right: Expr) -> bool:
    """Whether a decimal on one side is the other, exact side rounded."""
    for decimal, exact in ((answer.number, left), (gold.number, right)):
        if decimal is None or decimal.places is None or not exact.is_real:
            continue
        other = gold if exact is left else answer
        if other.number is None or other.number.places is None:
            nearest = Rational(str(exact.evalf(DIGITS))) if not exact.is_Rational else exact
            if is_rounding(decimal, Fraction(int(nearest.p), int(nearest.q))):
                return True
    return False
