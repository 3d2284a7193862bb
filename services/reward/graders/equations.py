r"""What an equation gives for an answer: `m + n = 33 + 40 = 73` says 73, `2x = 73` only relates.

The last side is the answer where the first names what was asked: a variable, `f(2)`, an object
(`\angle ABC`), words, or an expression of several names (`m + n`). One name among numbers (`2x`,
`13 + x`, `x^2`) is an equation still to be solved. Any other relation, a list and words that hedge
make it no answer. Whether numbers among the sides agree is for the graders to see.
"""

import re

from services.reward.graders.brackets import without_groups

RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|lt|gt|in|approx)(?![a-zA-Z])")

_ARROW = re.compile(r"\\(?:implies|iff|therefore|(?:Long|long)?[Rr]ightarrow)(?![a-zA-Z])|[⇒⟹→∴]")
_OTHER_RELATION = re.compile(
    r"[<>≤≥,;?]|\\(?:le|ge|ne|lt|gt|ll|gg|in|ni|notin|not|approx|sim|simeq|cong|equiv|propto|mid|nmid"
    r"|subset|subseteq|lor|land|vee|wedge|pm|mp|to|cup|cap|neg|lnot)(?![a-zA-Z])"
)
_HEDGE = re.compile(
    r"(?<![a-zA-Z\\])(?:and|or|nor|not|never|no|if|iff|unless|but|except|than|when|where|for|with"
    r"|since|because|either|neither|maybe|perhaps|possibly|wrong|false|incorrect|untrue|instead|while|isn't"
    r"|other)(?![a-zA-Z])",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|mbox|hbox|mathrm|operatorname)\s*\{([^{}]*)\}")
_DRESS = re.compile(
    r"\\(?:angle|triangle|square|measuredangle|overline|overrightarrow|vec|hat|bar|tilde|mathbf|mathbb"
    r"|mathcal|mathit|displaystyle|lvert|rvert|vert|lfloor|rfloor|lceil|rceil)(?![a-zA-Z])"
)
_PRIME = re.compile(r"'+|\^\s*\{?\s*(?:\\prime\s*)+\}?")
_INDEXED = re.compile(r"[a-zA-Z@]\s*_\s*(?:\{[^{}]*\}|\\?[a-zA-Z0-9])")
_OPERATOR = re.compile(
    r"\\(?:lim|int|oint|sum|prod|max|min|sup|inf|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp"
    r"|det|gcd|deg|dim|Pr|arg)(?![a-zA-Z])(?:\s*[\^_]\s*(?:\{[^{}]*\}|\w)){0,2}"
    r"\s*(?:\([^()]*\)|\{[^{}]*\}(?:\{[^{}]*\})?|\\?[a-zA-Z]+|\d+)?"
)
_APPLIED = re.compile(r"([a-zA-Z@])\s*\((?![^()]*\1)[^()]*\)|\[[A-Z ]+\]|\|[A-Z][A-Z ]*\|")
_NAME = re.compile(r"\\[a-zA-Z]+|[a-zA-Z@]")
_ONE_NAME = re.compile(r"\\[a-zA-Z]+|[a-zA-Z@ ]+")
_CONSTANTS = {"\\frac", "\\sqrt", "\\cdot", "\\times", "\\div", "\\pi", "\\infty", "\\degree"}
_NUMBERED_PROSE = re.compile(r"\d\s+[a-zA-Z]{2,}|(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+\d")
_APART = re.compile(r"\d\.?\s+(?:[a-z]{2,}\s|[a-zA-Z](?![a-zA-Z]))|\\cr(?![a-z])|\.\s*[a-zA-Z]")
_SUMMAND = re.compile(r"(?:\A|[-+(])\s*[\d.]+\s*(?=\Z|[-+)])")  # 13 + x + y
MAX_CALLS = 4  # within each other: f(g(2))


def sides(text: str) -> list[str]:
    """The sides of an equation (tidy) whose last one is its answer, or nothing."""
    text = _ARROW.split(text)[-1]
    outer = without_groups(text)
    places = [place for place, char in enumerate(outer) if char == "="]
    if not places:
        return []
    ends = [*places, len(text)]
    begins = [0, *(place + 1 for place in places)]
    found = [text[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    if not all(found) or _OTHER_RELATION.search(_outside_calls(outer)) or hedges(text):
        return []
    return [] if any(_is_remark(side) for side in found[1:-1]) else found


def _is_remark(side: str) -> bool:
    """Whether a name stands apart behind a number: `x = 13 in case y = 5`, `x = 13 y = 5`."""
    bare = _TEXT.sub("", side)
    if bare != side:
        return bool(set(_NAME.findall(bare)) - _CONSTANTS)
    return _APART.search(side) is not None


def hedges(text: str) -> bool:
    """Whether words in `text` make what it states no answer: "not", "if", "or" and their kin."""
    return _HEDGE.search(_TEXT.sub(r" \1 ", text)) is not None


def is_name(side: str) -> bool:
    """Whether a side of an equation (tidy) names the quantity that the equation gives."""
    if any(not re.search("[a-zA-Z]", words) for words in _TEXT.findall(side)):
        return False
    if hedges(side) or _NUMBERED_PROSE.search(_TEXT.sub(r" \1 ", side)):
        return False
    bare = _OPERATOR.sub("@", _PRIME.sub("", _DRESS.sub(" ", _TEXT.sub("@", side))))
    bare = _outside_calls(_INDEXED.sub("@", bare))
    names = [name for name in _NAME.findall(bare) if name not in _CONSTANTS]
    if _OTHER_RELATION.search(bare) or _SUMMAND.search(bare):
        return False
    return bool(names) and (
        _ONE_NAME.fullmatch(bare.strip(" (){}")) is not None
        or len(set(names)) + max(0, names.count("@") - 1) > 1
    )


def _outside_calls(text: str) -> str:
    """`text` with a name for each call and each object in bars: f(1, 2), |AB|."""
    for _ in range(MAX_CALLS):
        text, num = _APPLIED.subn("@", text)
        if not num:
            break
    return text
