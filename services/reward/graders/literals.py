r"""Numbers written out: exact values without algebra, whatever their size.

`3/4`, `-0.25`, `3\frac{1}{2}`, `0.\overline{3}`, `1.5e3`, `6.02\times 10^{23}` become fractions;
floats never appear, so tiny differences count. Integers beyond `MAX_DIGITS` are compared digit by
digit.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 4000

_DECIMAL = re.compile(r"(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,4}))?")
_FRACTION = re.compile(r"(?:\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|([\d.]+)\s*/\s*([\d.]+))")
_MIXED = re.compile(r"(\d+)\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|\s(\d+)\s*/\s*(\d+))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_SCIENTIFIC = re.compile(
    r"([\d.]+)\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,4})\s*\}|(\d))"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})\b\s*(.*)", re.IGNORECASE)
_CHANGE = re.compile(
    r"^\W*(?:squared|cubed|factorial|k\b)|\b(?:negative|minus|plus|below zero|half|halves)\b"
    r"|\b(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|(?:hundred|thousand|million)th)"
    r"(?:s\b|\W*$)"  # but 12 fifth graders
    r"|\b(?:dozen|hundred|thousand|million|billion|trillion)s?\b",
    re.IGNORECASE,
)
_NO_UNIT = re.compile(
    r"\b(?:or|and|not|no|to|if|but|than|more|less|most|least|about|is|are|was|isn't|never|unless|except"
    r"|wrong|incorrect|false|invalid|maybe|perhaps|possibly|probably|likely|guess|unsure|correct|true)\b"
    r"|\?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A literal. `value` is None for an integer longer than `MAX_DIGITS`, then `digits` tells."""

    value: Fraction | None
    digits: str  # canonical spelling of a plain decimal, else ""
    places: int | None  # decimal places written, None for fractions and integers
    significant: int  # digits written, leading zeros left out


def read_number(text: str) -> Number | None:
    """The number that `text` (tidy) spells out, or None."""
    sign, body = _sign(text)
    if not body or body[0] not in "0123456789.\\":
        return None
    number = _decimal(body)
    if number is None:
        value = _exact(body)
        number = None if value is None else Number(value, "", None, 0)
    if number is None or sign > 0:
        return number
    negative = None if number.value is None else -number.value
    return Number(negative, _negated(number.digits), number.places, number.significant)


def same_number(gold: Number, answer: Number) -> bool:
    """Exactly equal, or a decimal that rounds the other, exact one correctly (`is_rounding`)."""
    if gold.value is None or answer.value is None:
        return bool(gold.digits) and gold.digits == answer.digits
    if gold.value == answer.value:
        return True
    if answer.places is not None and gold.places is None and gold.value.denominator > 1:
        return is_rounding(answer, gold.value)
    if gold.places is not None and answer.places is None and answer.value.denominator > 1:
        return is_rounding(gold, answer.value)
    return False


def scaled(value: str, words: str) -> tuple[str, str]:
    """`5` and "million dollars" are 5000000 and "dollars"; other words leave the value alone."""
    match, number = _SCALE.fullmatch(words), read_number(value)
    if match is None or number is None or number.value is None:
        return value, words
    product = number.value * _SCALES[match[1].lower()]
    text = f"\\frac{{{product.numerator}}}{{{product.denominator}}}"
    return str(product) if product.denominator == 1 else text, match[2]


def is_changed_by(words: str) -> bool:
    """Whether `words` behind a number make it another: "squared", "halves", "(negative)"."""
    return _CHANGE.search(words) is not None


def is_remark(words: str) -> bool:
    """Whether `words` behind a number say something about it: "or so", "(wrong)"."""
    return _NO_UNIT.search(words) is not None


def is_rounding(decimal: Number, exact: Fraction) -> bool:
    """Whether `decimal` is `exact` rounded, with at least six significant digits."""
    if decimal.places is None or decimal.value is None or decimal.significant < 6:
        return False
    return abs(decimal.value - exact) <= Fraction(1, 2 * 10**decimal.places)


def share(percent: Number) -> Number:
    """A percentage as a share of one."""
    value = None if percent.value is None else percent.value / 100
    places = None if percent.places is None else percent.places + 2
    return Number(value, "", places, percent.significant)


def _sign(text: str) -> tuple[int, str]:
    sign = 1
    while text[:1] in {"+", "-"}:
        sign = -sign if text[0] == "-" else sign
        text = text[1:].lstrip()
    return sign, text


def _decimal(body: str) -> Number | None:
    match = _DECIMAL.fullmatch(body)
    if match is None:
        return None
    whole, fraction, exponent = match[1], match[2] or "", int(match[3] or 0)
    if not whole and not fraction:
        return None
    digits = whole.lstrip("0") or "0"
    if fraction.strip("0"):
        digits += "." + fraction.rstrip("0")
    significant = len((whole + fraction).lstrip("0"))
    if len(whole) + len(fraction) > MAX_DIGITS:
        return None if exponent else Number(None, digits, None, significant)
    value = Fraction(int(whole + fraction), 10 ** len(fraction)) * Fraction(10) ** exponent
    places = max(0, len(fraction) - exponent) if fraction else None
    return Number(value, "" if exponent else digits, places, significant)


def _exact(body: str) -> Fraction | None:
    """A mixed number, a fraction of literals or scientific notation."""
    if len(body) > MAX_DIGITS:
        return None
    if match := _MIXED.fullmatch(body):
        whole, over, under = match[1], match[2] or match[4], match[3] or match[5]
        return None if not int(under) else int(whole) + Fraction(int(over), int(under))
    if match := _FRACTION.fullmatch(body):
        over_, under_ = (
            read_number((match[1] or match[3]).strip()),
            read_number((match[2] or match[4]).strip()),
        )
        return _quotient(over_, under_)
    if match := _REPEATING.fullmatch(body):
        fixed, period = match[2], match[3] or match[4]
        whole = Fraction(int((match[1] or "0") + fixed), 10 ** len(fixed))
        return whole + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    if match := _SCIENTIFIC.fullmatch(body):
        mantissa = _decimal(match[1])
        if mantissa is not None and mantissa.value is not None:
            return mantissa.value * Fraction(10) ** int(match[2] or match[3])
    return None


def _quotient(over: Number | None, under: Number | None) -> Fraction | None:
    if over is None or under is None or over.value is None or not under.value:
        return None
    return over.value / under.value


def _negated(digits: str) -> str:
    return digits if digits in {"", "0"} else f"-{digits}"
