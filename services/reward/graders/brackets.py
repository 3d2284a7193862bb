"""Where brackets open and close in a tidy answer, and what stands between separators outside them.

Everything takes linear time and never recurses.
"""

import re

_BRACKET = re.compile(r"\\[{}]|[()\[\]{},;]|\\cup(?![a-z])")
_DEPTH = {"(": 1, "[": 1, "{": 1, "\\{": 1, ")": -1, "]": -1, "}": -1, "\\}": -1}


def nesting(text: str) -> int:
    """How deep brackets of all kinds stand within each other."""
    depth = deepest = 0
    for match in _BRACKET.finditer(text):
        depth += _DEPTH.get(match.group(), 0)
        deepest = max(deepest, depth)
    return deepest


def closing_place(text: str) -> int:
    """Where the bracket that opens `text` closes; -1 if it does not."""
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += _DEPTH.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return -1


def split_top(text: str, separators: str) -> list[str]:
    """Parts between separators outside brackets, empty ones left out."""
    parts, begin, depth = [], 0, 0
    for match in _BRACKET.finditer(text):
        token = match.group()
        depth += _DEPTH.get(token, 0)
        if depth == 0 and token in separators:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def without_groups(text: str) -> str:
    """`text` with everything in braces blanked out, in the same places."""
    depth, kept = 0, []
    for place, char in enumerate(text):
        if char in "{}" and text[place - 1 : place] != "\\":
            depth += 1 if char == "{" else -1
        kept.append(char if depth <= 0 and char != "}" else " ")
    return "".join(kept)
