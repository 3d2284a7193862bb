r"""Conditions on one variable in one spelling: `x > 1 \text{ and } x < 5` is `1<x<5`.

`\{x : 1 < x < 5\}` and `]1,5[` likewise. What joins two bounds with nothing in between (`x < 1 and
x > 5`) is left alone: people write it for a union.
"""

import re

from services.reward.graders.brackets import split_top
from services.reward.graders.literals import read_number

INEQUALITY = re.compile(r"\\(?:le|ge|lt|gt)(?![a-zA-Z])|[<>]")
_EXCLUSION = re.compile(r"\\ne(?![a-zA-Z])")
_AND = re.compile(
    r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*,?\s*and\s*\}|(?<![\\a-zA-Z])and(?![a-zA-Z])"
    r"|\\(?:land|wedge)(?![a-zA-Z])"
)
_VARIABLE = re.compile(r"\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?")
_BUILDER = re.compile(
    r"\\\{\s*(\\?[a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}|\\in\s*R)?\s*"
    r"(?::|\||\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\colon(?![a-zA-Z]))(.+)\\\}"
)
_TURNED = re.compile(r"([\[\]])([^\[\](){}]+,[^\[\](){}]+)([\[\]])")
_FALLING = re.compile(
    r"([^<>=]+?)\s*(>|\\ge(?![a-zA-Z])|\\gt(?![a-zA-Z]))\s*(\\?[a-zA-Z]+)\s*"
    r"(>|\\ge(?![a-zA-Z])|\\gt(?![a-zA-Z]))\s*([^<>=\\,;]+|-?\\[^<>=,;]+)"
)
_RISING = {">": "<", "\\gt": "<", "\\ge": "\\le "}
_UPPER = {"<": "<", "\\lt": "<", "\\le": "\\le "}


def one_spelling(text: str) -> str:
    """`text` (tidy) as a chain of inequalities or an interval, where it is a condition."""
    if turned := _TURNED.fullmatch(text):
        return _interval(turned[1], turned[2], turned[3])
    if not INEQUALITY.search(text) and not _EXCLUSION.search(text):
        return text
    if falling := _FALLING.fullmatch(text):
        high, upper, variable, lower, low = falling.groups()
        return f"{low}{_RISING[lower]}{variable}{_RISING[upper]}{high}"
    builder = _BUILDER.fullmatch(text)
    condition = builder[2].strip() if builder and builder[1] in builder[2] else text
    return _joined(condition) or condition


def _interval(left: str, inner: str, right: str) -> str:
    """`]1,5]` is (1,5]: the bracket that is turned away is open."""
    return f"{'[' if left == '[' else '('}{inner}{']' if right == ']' else ')'}"


def _joined(text: str) -> str:
    """A lower and an upper bound of one variable as a chain, or nothing."""
    parts = split_top(_AND.sub(",", text), ",;")
    bounds = [_bound(part) for part in parts]
    if len(bounds) != 2 or None in bounds:
        return ""
    (lower, upper) = sorted((one for one in bounds if one), key=lambda one: not one[1])
    if lower[0] != upper[0] or not lower[1] or upper[1] or _is_reversed(lower[3], upper[3]):
        return ""
    return f"{lower[3]}{lower[2]}{lower[0]}{upper[2]}{upper[3]}"


def _bound(text: str) -> tuple[str, bool, str, str] | None:
    """Variable, whether it is bounded from below, the relation, the bound."""
    signs = list(INEQUALITY.finditer(text))
    if len(signs) != 1:
        return None
    sign = signs[0].group()
    left, right = text[: signs[0].start()].strip(), text[signs[0].end() :].strip()
    if not left or not right or bool(_VARIABLE.fullmatch(left)) == bool(_VARIABLE.fullmatch(right)):
        return None
    is_lower = (sign in _RISING) == bool(_VARIABLE.fullmatch(left))
    variable, bound = (left, right) if _VARIABLE.fullmatch(left) else (right, left)
    return variable, is_lower, (_RISING | _UPPER)[sign], bound


def _is_reversed(low: str, high: str) -> bool:
    """Whether nothing lies between two numbers."""
    left, right = read_number(low), read_number(high)
    if left is None or right is None or left.value is None or right.value is None:
        return False
    return left.value > right.value
