r"""The shape of a tidy answer: a leaf, a list, a tuple, an interval, a set, a matrix, `x = ...`.

Shapes are read here and not by math-verify, whose parser takes 100 ms for `(15,-29)`; it gets the
leaves. Reading splits at top-level commas and never goes deeper than `MAX_DEPTH`.
"""

import re
from dataclasses import dataclass

from services.reward.graders.brackets import closing_place, nesting, split_top, without_groups
from services.reward.graders.equations import RELATION, is_name
from services.reward.graders.literals import Number, is_changed_by, is_remark, read_number, scaled
from services.reward.graders.ranges import INEQUALITY, one_spelling

MAX_DEPTH = 40
MAX_ITEMS = 200


class Unreadable(Exception):
    """The text says what cannot be read."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value. Example: `15\\mbox{ cm}^2` has value '15', unit 'cm^2' and number 15."""

    text: str  # all of it, tidy
    value: str  # without unit and percent sign
    number: Number | None = None
    unit: str = ""
    is_percent: bool = False
    word: str = ""  # folded, when it consists of letters alone
    is_textual: bool = False  # words for sure, not a product of symbols
    clock: tuple[str, ...] = ()  # 12:30 pm


@dataclass(frozen=True, slots=True)
class Group:
    """Several values. kind: list (no brackets) | bracket | set | union | matrix | row."""

    text: str
    kind: str
    items: "tuple[Form, ...]"
    brackets: str = ""  # '()', '[)' ...


@dataclass(frozen=True, slots=True)
class Assigned:
    """`x = value` or `x \\in value`."""

    text: str
    variable: str
    value: "Form"


Form = Leaf | Group | Assigned

_TEXT = re.compile(
    r"\\(?:text|mbox|hbox|mathrm|textrm|textbf|textit|textnormal|mathbf|mathit|operatorname)\s*"
    r"\{([^{}]*)\}"
)
_TEXT_SEPARATOR = re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*,?\s*(?:and|or)\s*\}")
_SEPARATOR = re.compile(
    r"(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])|\\(?:lor|vee|land|wedge)(?![a-zA-Z])"
)
_WORD_SEPARATOR = re.compile(r"\s*,\s*(?:and\s+)?|\s+and\s+")
_OR = re.compile(
    r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*,?\s*or\s*\}|(?<![\\a-zA-Z])or(?![a-zA-Z])"
    r"|\\(?:lor|vee)(?![a-zA-Z])"
)
_PROSE = re.compile(
    r"\\(?:text|mbox|hbox|textrm|textbf|textit|textnormal)\s*\{[^{}]*(?:[A-Za-z]{2}|\bk\b)"
)
_GOES_ON = re.compile(r"\d\s*\\(?:[lc]?dots|dotsc)$|\?\s*\}?$")  # 5\ldots
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_ASSIGNED = re.compile(
    r"(\\(?:text|mathrm)\{[^{}]*\}(?:\s*\([^()=]*\)|[A-Z ]*)"
    r"|\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'?(?:\([a-z](?:,[a-z])*\))?)\s*(?:=|\\in(?![a-z])|:=)\s*([^=<>]+)"
)
_NAMED_TUPLE = re.compile(r"\(([a-zA-Z](?:,[a-zA-Z])+)\)=\(([^()\[\]{}]+)\)")
_MATRIX = re.compile(r"\\begin\{([pbvB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}")
_CLOCK = re.compile(r"(\d{1,6}):(\d{1,6})(?::(\d{1,6}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_CURRENCY = re.compile(r"^([-+]?)\s*(?:US)?(\\?\$|€|£|¥)\s*")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_BASE = re.compile(
    r"(\d[\dA-F]*)_\s*(?:\{\s*(\d+)\s*\}|(\d+)"
    rf"|\{{?\s*\\(?:text|mathrm)\s*\{{\s*({'|'.join(_BASES)})\s*\}}\s*\}}?)"
)
_PRIMED = re.compile(r"([-+]?[\d.]+)('{1,2})")  # minutes and seconds of arc, feet and inches
_TEXT_UNIT = re.compile(_TEXT.pattern + r"\s*(?:\^\s*\{?\s*(\d)\s*\}?)?$")
_WORD_UNIT = re.compile(
    r"([-+]?\s*[\d./]*\d\.?(?:\s\d+/\d+)?|[-+]?\\frac\{[^{}]*\}\{[^{}]*\})"
    r"(\s*)([A-Za-z](?:[A-Za-z./ ]*[A-Za-z.])?)\s*(?:\^\s*\{?\s*(\d)\s*\}?)?"
)
_LETTERS = re.compile(r"[A-Za-z](?:[A-Za-z' -]*[A-Za-z])?")
_CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")

_UNIT_NAMES = {
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "meter": "m", "metre": "m",
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "gram": "g",
    "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "deg": "degree", "dollar": "$", "usd": "$", "liter": "l", "litre": "l",
}  # fmt: skip
_SHORT_UNITS = {
    "cm", "mm", "km", "in", "ft", "yd", "mi", "kg", "mg", "lb", "oz", "mph", "kph", "hr", "min",
    "sec", "deg", "ml", "sq", "am", "pm",
}  # fmt: skip
_CHOSEN = re.compile(
    r"(?:\\(?:text|textbf|mathbf|mathrm|textrm)\s*\{\s*\(?([A-J])\)?[.:]?\s*\}|\(([A-J])\)|([A-J])[.:)])(.+)"
)
_SECOND_CHOICE = re.compile(
    r"\s*(?:,|;|/|&|\\&|and\b|or\b|\\text\s*\{\s*,?\s*(?:and|or)|\\(?:lor|vee|land|wedge)(?![a-z]))"
    r"|.*(?:\([A-J]\)|\\(?:text|textbf|mathbf|mathrm|textrm)\s*\{\s*\(?[A-J]\)?\s*\})"
)
_CAPITALS = re.compile(r"[A-Z]{2,}")
_BARE_UNITS = {"m", "g", "s", "h", "l", "L", "N", "J", "W", "V", "K"}
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arc", "log", "exp", "sqrt", "mod", "frac")


def read_form(text: str, *, depth: int = 0) -> Form:
    """The shape of `text` (tidy); raises `Unreadable` where it nests too deeply."""
    if text.isascii() and text.isdigit():  # most answers are, and some have thousands of digits
        return Leaf(text, text, read_number(text))
    if depth > MAX_DEPTH or (depth == 0 and nesting(text) > MAX_DEPTH):
        raise Unreadable(f"nested deeper than {MAX_DEPTH}")
    text = text.strip()
    if depth == 0:
        text = _named_parts(one_spelling(text))
        if len(ranges := _split_ranges(text)) > 1:
            return Group(text, "union", _read_all(ranges, depth))
        text = _with_commas(_words_apart(text))
    parts = split_top(text, ",;")
    if len(parts) > 1:
        return _list(text, parts, depth)
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(text, matrix[2], depth)
    unions = split_top(text, "\\cup")
    if len(unions) > 1:
        return _union(text, _read_all(unions, depth))
    if (assigned := _ASSIGNED.fullmatch(text)) and is_name(assigned[1]):
        return Assigned(text, assigned[1], read_form(assigned[2], depth=depth + 1))
    return _bracketed(text, depth) or _plus_minus(text, depth) or read_leaf(text)


def _named_parts(text: str) -> str:
    """`(x,y)=(1,2)` as `x=1,y=2`."""
    match = _NAMED_TUPLE.fullmatch(text)
    if match is None:
        return text
    names, values = match[1].split(","), match[2].split(",")
    if len(names) != len(values):
        return text
    return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _words_apart(text: str) -> str:
    """`\\text{A, C}` and `\\text{A and C}` as two texts."""
    match = _TEXT.fullmatch(text)
    words = _WORD_SEPARATOR.split(match[1].strip()) if match else []
    return ",".join(f"\\text{{{word}}}" for word in words) if len(words) > 1 else text


def _with_commas(text: str) -> str:
    """Commas for "and" and "or", except within words: `\\text{three or more}`."""
    text = _TEXT_SEPARATOR.sub(",", text)
    parts, end = [], 0
    for match in _SEPARATOR.finditer(without_groups(text)):
        parts.append(text[end : match.start()])
        end = match.end()
    return ",".join([*parts, text[end:]])


def _split_ranges(text: str) -> list[str]:
    """The parts of `x<3 \\text{ or } x>5`, which is a union; nothing where one is no inequality."""
    parts = _OR.split(text)
    is_union = all(INEQUALITY.search(without_groups(part)) for part in parts)
    return parts if is_union and not _SEPARATOR.search(_OR.sub("", text)) else []


def _union(text: str, parts: tuple[Form, ...]) -> Group:
    """A union of sets is the set of their elements."""
    sets = [part for part in parts if isinstance(part, Group) and part.kind == "set"]
    if len(sets) < len(parts):
        return Group(text, "union", parts)
    elements = {item.text: item for part in sets for item in part.items}
    return Group(text, "set", tuple(elements.values()), "\\{\\}")


def _read_all(parts: list[str], depth: int) -> tuple[Form, ...]:
    if len(parts) > MAX_ITEMS:
        raise Unreadable(f"{len(parts)} answers exceed {MAX_ITEMS}")
    return tuple(read_form(part, depth=depth + 1) for part in parts)


def _list(text: str, parts: list[str], depth: int) -> Form:
    """`n = 1, 2, 3` assigns the whole list."""
    items = _read_all(parts, depth)
    first = items[0]
    if isinstance(first, Assigned) and not any(isinstance(x, Assigned) for x in items[1:]):
        values = Group(text, "list", _flat((first.value, *items[1:])))
        return Assigned(text, first.variable, values)
    return Group(text, "list", _flat(items))


def _flat(items: tuple[Form, ...]) -> tuple[Form, ...]:
    """A list within a list (from a plus-minus) is part of it."""
    flat: list[Form] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Group) and item.kind == "list" else [item])
    return tuple(flat)


def _matrix(text: str, body: str, depth: int) -> Group:
    rows = [row for row in body.split("\\cr") if row.strip()]
    return Group(
        text,
        "matrix",
        tuple(Group(row, "row", _read_all(row.split("&"), depth)) for row in rows),
    )


def _bracketed(text: str, depth: int) -> Form | None:
    r"""`(1,2)`, `[0,1)`, `\{1,2\}`; brackets around one value are left out."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in {"(", "[", "\\{"} or closing not in {")", "]", "\\}"}:
        return None
    if closing_place(text) != len(text) - len(closing) or _CHOICE.fullmatch(text):
        return None
    inner = text[len(opening) : -len(closing)].strip()
    if not inner:
        return Group(text, "set" if opening == "\\{" else "bracket", (), opening + closing)
    parts = split_top(inner, ",;")
    if opening == "\\{":
        distinct = list(dict.fromkeys(parts))
        return Group(text, "set", _flat(_read_all(distinct, depth)), opening + closing)
    if len(parts) > 1:
        return Group(text, "bracket", _read_all(parts, depth), opening + closing)
    return read_form(inner, depth=depth + 1) if opening + closing == "()" else None


def _plus_minus(text: str, depth: int) -> Group | None:
    if text.count("\\pm") + text.count("\\mp") != 1:
        return None
    left, right = re.split(r"\\pm|\\mp", text)
    plus = f"{left}+{right}" if left.strip() else right
    return Group(text, "list", _read_all([plus, f"{left}-{right}"], depth))


def split_choice(text: str) -> tuple[str, str]:
    """Letter and value of an answer to a multiple-choice question that gives both, or nothing.

    Two letters are two answers: `(A) and (B)` chooses none.
    """
    match = _CHOSEN.fullmatch(text)
    if match is None or _SECOND_CHOICE.match(match[4]):
        return "", ""
    return match[1] or match[2] or match[3], match[4].strip()


def read_leaf(text: str) -> Leaf:
    """A single value with its unit, if it has one."""
    if clock := _CLOCK.fullmatch(_TEXT.sub(lambda match: match[1], text)):
        return Leaf(text, text, clock=tuple((part or "").lower() for part in clock.groups()))
    value, unit, is_percent = _without_unit(text)
    if unit and not value:
        return _words(text, unit)
    number = read_number(value)
    if number is not None or unit:
        return Leaf(text, value, number, unit, is_percent)
    inner = _TEXT.sub(lambda match: match[1], value).strip()
    choice = _CHOICE.fullmatch(inner)
    inner = choice[1] if choice else inner
    if inner != value and (number := read_number(inner)) is not None:  # \text{5}
        return Leaf(text, inner, number)
    if _LETTERS.fullmatch(inner):
        # Capitals are points, words or matrices: AB is not BA.
        is_textual = _TEXT.search(value) is not None or " " in inner
        is_textual |= _CAPITALS.fullmatch(inner) is not None
        return _words(text, inner, is_textual=is_textual)
    if _PROSE.search(value) or _GOES_ON.search(
        value
    ):  # math-verify would read over it: `13 \\text{ or more}`
        return _words(text, inner)
    return Leaf(text, value, None, unit, is_percent)


def _words(text: str, words: str, *, is_textual: bool = True) -> Leaf:
    word = " ".join(words.casefold().rstrip(".").split())
    return Leaf(text, text, word=word, is_textual=is_textual)


def _without_unit(text: str) -> tuple[str, str, bool]:
    """Value, unit and whether a percent sign was there."""
    value, unit = text, ""
    if currency := _CURRENCY.match(value):
        value, unit = currency[1] + value[currency.end() :], currency[2].strip("\\")
    is_percent = value.endswith("\\percent")
    value = value.removesuffix("\\percent").strip()
    if value.endswith("\\degree") and not _TRIGONOMETRIC.search(value):
        return value.removesuffix("\\degree").strip(), "degree", is_percent
    if minutes := _PRIMED.fullmatch(value):
        return minutes[1], minutes[2], is_percent
    if (based := _BASE.fullmatch(value)) is not None:
        return based[1], f"base {based[2] or based[3] or _BASES[based[4]]}", is_percent
    found = _TEXT_UNIT.search(value)
    if found and (before := value[: found.start()].strip()):
        amount, words = scaled(before, found[1])
        if not is_remark(words) and not is_changed_by(words):
            return amount, _unit(words, found[2]) or unit, is_percent
    plain = _WORD_UNIT.fullmatch(value)
    if plain and _is_unit(plain[3], is_apart=bool(plain[2])):
        amount, words = scaled(plain[1].strip(), plain[3])
        if not is_remark(words) and not is_changed_by(words):
            return amount, _unit(words, plain[4]) or unit, is_percent
    return value, unit, is_percent


def _is_unit(words: str, *, is_apart: bool) -> bool:
    """`5cm` and `13 apples`, but neither `2xy` nor `2 sin x`: letters may be symbols."""
    if is_apart and (words in _BARE_UNITS or (words[0] in _BARE_UNITS and "/" in words)):
        return True
    first = words.lower().split()[0].rstrip(".")
    if first in _SHORT_UNITS or first.removesuffix("s") in _UNIT_NAMES:
        return True
    return is_apart and len(first) > 2 and not first.startswith(_FUNCTIONS)


def _unit(words: str, power: str | None) -> str:
    names = re.sub(r"[^a-z$/ ]", "", words.lower()).split()
    singular = [name if len(name) < 3 else name.removesuffix("s") for name in names]
    unit = " ".join(_UNIT_NAMES.get(name, name) for name in singular)
    for word, exponent in (("square ", "2"), ("cubic ", "3"), ("sq ", "2")):
        if unit.startswith(word):
            return f"{unit.removeprefix(word)}^{exponent}"
    return f"{unit}^{power}" if power and power != "1" else unit


def is_relation(text: str) -> bool:
    """Whether a relation stands outside all braces: the one in a sum's bounds does not."""
    return RELATION.search(without_groups(text)) is not None
