r"""One spelling for one answer: `tidy` removes what LaTeX and people write around a value.

Only appearance goes: Unicode becomes ASCII or LaTeX, spacing and sizing commands vanish, fractions
get their braces, thousands lose their separators. Nothing here knows what an expression means.
"""

import re
import unicodedata

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "‒": "-",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ",
    "≈": r"\approx ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "°": r"^\circ ", "º": r"^\circ ", "′": "'", "％": "%", "：": ":", "，": ",",
    "。": ".", "（": "(", "）": ")",
    "“": '"', "”": '"', "’": "'", "‘": "'", "…": r"\ldots ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR_FRACTION = re.compile(r"(\d+)⁄(\d+)")  # what Unicode makes of ⅝
_SUPERSCRIPT_RUN = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_DELIMITERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`"), ("**", "**"), ('"', '"'),
)  # fmt: skip

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\(?:\[[^\]]{0,20}\])?", r"\\cr "),
        (r"(?:^|(?<=\s))\*\*([^*]+)\*\*(?=\s|$|[.,:;])", r"\1"),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*", ""),
        (r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),  # 1{,}000
        (r"(?:\\text)?\{([:;,.])\}", r"\1"),
        (
            r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:bf|it|rm|sf|tt|[lL]arge|LARGE|[hH]uge|small|normalsize"
            r"|bfseries|boldmath|underline)(?![a-zA-Z])\s*",
            "",
        ),
        (r"\\mathrm\s*\{([ie])\}", r"\1"),
        (r"\\log\s*_\s*\{?e\}?(?![a-zA-Z])", r"\\ln "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"^-\\infty\s*<\s*\\?[a-zA-Z]+\s*<\s*\+?\\infty\s*$", r"(-\\infty,\\infty)"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\{\s*([^{}]+?)\s*\\choose(?![a-zA-Z])\s*([^{}]+?)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\sqrt\s*\[\s*(\d?[13579])\s*\]\s*\{\s*-\s*([^-+{}]+)\}", r"-\\sqrt[\1]{\2}"),  # real
        (r"(\\mathbb\s*\{?R\}?)\s*(?:-|\\backslash(?![a-z]))\s*(?=\\\{)", r"\1\\setminus "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (
            r"(?i)^(?:\\(?:text|mbox|mathrm)\s*\{\s*)?all real(?: number)?s?\s*\}?$",
            r"\\mathbb{R}",
        ),
        (r"\\(?:display|text|script)style(?![a-zA-Z])|\\(?:no)?limits(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\\[!,;: ]|,\\[!,; ]|~)+\s?(?=\d{3}(?!\d))", ""),  # 10\,080 and 10,\!080
        (r"\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])s?", r"\\degree "),
        (r"\\leq?q?(?:slant)?(?![a-zA-Z])", r"\\le "),
        (r"\\geq?q?(?:slant)?(?![a-zA-Z])", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|\\not\s*=|(?<![\d)!])!=|=/=", r"\\ne "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"==", "="),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (
            r"^(?:=|\\(?:approx|simeq|sim|cong)(?![a-zA-Z])|(?:approximately|about|roughly) "
            r"|\\text\s*\{\s*(?:approximately|about|roughly)\s*\})\s*",
            "",
        ),
        (  # 73 \\pmod{1000}
            r"^([-+]?\d+)\s*(?:\\pmod\s*(?:\{\s*\d+\s*\}|\d+)"
            r"|\(\s*(?:\\?mod|\\bmod|\\text\s*\{\s*mod\s*\})\s*\d+\s*\))$",
            r"\1",
        ),
        (  # what runs through all integers: x = 2\\pi k, k \\in \\mathbb{Z}
            r"(?<=[^\s,;(])[\s,;(]+[a-zA-Z]\s*\\in\s*\\mathbb\s*\{?Z\}?\s*\)?\s*\.?\s*$",
            "",
        ),
        (r"\\(?:lbrace|lbrack)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace|rbrack)(?![a-zA-Z])", r"\\}"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])inf(?:inity)?(?![a-zA-Z])", r"\\infty "),
        (r"\\(?:text|mbox)\s*\{\s*\\infty\s*\}", r"\\infty "),
        (r"(?<=\d)(?:\\?%|\s*\bpercent\b)", r"\\percent "),
        (r"\\?%", r"\\percent "),
        (r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    ]
]
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?!\d|,\d)")
_BRACKETED = re.compile(r"[(\[]|\\\{")
_SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+")
_IDLE_SPACE = re.compile(r"(?<!\w) | (?!\w)")  # x + 1 is x+1, while 3 1/2 is not 31/2
_LEADING = " \t\n,;:"  # a leading point belongs to .75
_TRAILING = " \t\n.,;:"


def tidy(text: str) -> str:
    """`text` in the one spelling; linear in its length up to a small factor."""
    return readings(text)[0]


def readings(text: str) -> tuple[str, ...]:
    """The spelling of `text`, and another one where a comma is ambiguous, the usual one first.

    `200,100` is a number or two of them; in brackets, where other commas are left, it is two
    numbers before it is one: `(1,000, 2,500)`.
    """
    if text.isascii() and text.isdigit():
        return (text,)
    text = _spelled(text)
    as_numbers = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    both = (as_numbers, text)
    if _BRACKETED.search(text):
        both = (text, as_numbers if "," in as_numbers else text)
    return tuple(dict.fromkeys(_without_braces(_IDLE_SPACE.sub("", one)) for one in both))


def _spelled(text: str) -> str:
    text = " ".join(_plain_characters(text).split())
    text = _without_delimiters(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _stripped(" ".join(text.split()))
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    return text


def _stripped(text: str) -> str:
    """Without points and spaces around it, `\\,` among them; a bare backslash is no end."""
    return text.lstrip(_LEADING).rstrip(_TRAILING + "\\")


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(_raised, text)
    return "".join(_UNICODE.get(char) or _plain_character(char) for char in text)


def _raised(match: re.Match[str]) -> str:
    """An exponent; a sign alone is one of the number behind it."""
    run = match.group().translate(_SUPERSCRIPTS)
    return "^{" + run + "}" if any(char.isdigit() for char in run) else run


def _plain_character(char: str) -> str:
    if char.isascii():
        return char
    if unicodedata.category(char) == "Nd":
        return str(unicodedata.digit(char))
    if unicodedata.category(char) in {"Zs", "Cf"}:
        return " " if unicodedata.category(char) == "Zs" else ""
    return _VULGAR_FRACTION.sub(r"\\frac{\1}{\2}", unicodedata.normalize("NFKC", char))


def _without_delimiters(text: str) -> str:
    """Take off `$...$` and the like where they enclose all of it; other dollars are amounts."""
    for _ in range(4):
        text = _stripped(text)
        for left, right in _DELIMITERS:
            inner = text[len(left) : -len(right)]
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                if right in inner and left == right:
                    continue
                text = inner
                break
        else:
            break
    return re.sub(r"(?<!\\)\$(?!\s*\d)|\\\(|\\\)", "", text)


def _without_braces(text: str) -> str:
    """Take off braces around everything: `{5}` is 5. `\\{5\\}` is a set and stays."""
    while text.startswith("{") and text.endswith("}") and not text.endswith("\\}"):
        inner = text[1:-1]
        if "{" in inner or "}" in inner:
            return text
        text = inner.strip()
    return text
