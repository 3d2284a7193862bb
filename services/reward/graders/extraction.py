r"""Which part of a response is its answer. The rules, in order:

1. Only what follows the last closing reasoning tag (`</think>` and its kin) is read. Reasoning that
   opens and never closes has been cut off: there is no answer.
2. Strict statements are `\boxed{...}`, `\fbox{...}`, `<answer>...</answer>`, a label with a colon
   (`Answer: ...`, `**Final answer:** ...`), "final answer is 5" and GSM8K's `#### 18` (before
   words it is a heading). The one that begins last wins, so hedging does not pay, and a box on an
   `Answer:` line is its answer. Emphasis around an answer is not part of it. Behind a box or a
   tag a label counts only where it begins a clause: "to check the answer: it is odd" takes back
   nothing.
3. Boxes joined by nothing but a comma, "and" or "or" ("or maybe", "or x =") are one list.
4. A strict statement that is empty or never ends is no answer, and earlier ones do not replace it;
   nor is a box that the words before it deny ("not \boxed{5}").
5. A label's answer ends with its line or sentence, and before what explains it (", since 6 fails",
   "(see above)") unless that hedges or, in parentheses, is an equation.
6. Without a strict statement, the last "answer is ..." counts up to the end of its sentence, a
   formula there by itself unless "or" or another one follows.
7. A response that is one line with nothing but a number or one formula is its own answer.

Everything takes linear time, whatever the text.
"""

import re
from dataclasses import dataclass

_REASONING_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>")
_REASONING_START = re.compile(r"<(?:think|thinking|thought|reasoning)>|<\|begin_of_thought\|>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t\n]*")
_BARE_BOX = re.compile(r"[-+]?\w[\w.,/]{0,99}")
_LABEL = re.compile(
    r"(?<![A-Za-z])answer(?:[ \t]{1,3}is)?[ \t]{0,3}[*_]{0,3}[ \t]{0,3}[:：=][ \t]{0,3}[*_]{0,3}"
    r"|(?<![A-Za-z])final answer is[ \t]{0,3}(?=[-+$\\(\d])"
    r"|(?<!\#)\#{4}(?!\#)(?=[ \t*_`]{0,9}\n?[ \t*_`]{0,9}(?:[-+−–$€£¥\\(.\d]|[a-z] ?=))"
    r"(?![ \t]*\d{1,2}[.)][ \t]+[a-z])",  # `#### Check` and `#### 2. Check` are headings
    re.IGNORECASE,
)
# What may stand between the beginning of a clause and its label: ", so the Answer: 5".
_CLAUSE_BEGIN = re.compile(
    r"(?:\A|[\n.!?;,:})\]$>]|\\\])[\s*_#>\-]*"
    r"(?:(?:so|thus|hence|therefore|then|and|but|the|my|our|final|correct|is|short|in)[\s,*_]+){0,5}\Z",
    re.IGNORECASE,
)
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_PROSE = re.compile(
    r"(?<![A-Za-z])answer[ \t]{1,3}(?:is|equals|will be|must be)[ \t]", re.IGNORECASE
)
_DENIED = re.compile(r"(?:\b(?:not|never)|n't|\\neq?|≠)[\s$*(:]*$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_CLAUSE_END = re.compile(
    r",(?=\s+(?!(?:and|or|but|if|unless|though|maybe|perhaps|possibly|alternatively)\b)[A-Za-z]{2})"
    r"|;(?=\s)"
)
# What explains an answer behind a label, and what takes it back or adds another one.
_EXPLANATION = re.compile(
    r"[,;]\s+(?:since|because|as|where|which|by|with equality)\b|\s+(?:since|because)\b"
    r"|\s+\((?:since|because|as|see|by|from|using|rounded|verified|checked|obtained)\b[^()=]*\)\s*\Z"
)
_APPROXIMATION = re.compile(
    r"(?:\s+\((?:about|approximately|approx\.?|roughly)\s[^()=]*\)"
    r"|[,;]\s+(?:about|approximately|roughly)\s[^()=,;]*)\s*\Z"  # of what is no decimal
)
_DECIMAL = re.compile(r"[-+−$*_\d.,\s]*")
_HEDGE = re.compile(
    r"\b(?:or|but|if|unless|though|maybe|perhaps|possibly|probably|alternatively|actually|instead|wrong"
    r"|incorrect|false|not the answer|could|may|might|either|another|other|else|correction)\b",
    re.IGNORECASE,
)
_JOIN_FRAME = re.compile(
    r"\\(?:q?quad|text|mbox|mathrm|textrm)(?![a-z])|\\[,;:! ()\[\]]|\\\\|[\s${}()*~]"
)
_JOIN = re.compile(
    r"(?:[,;/&]|\\[lv]or|\\vee|,?(?:and|or)(?:also|else|even|maybe|perhaps|possibly|probably)?)"
    r"(?:\\?[a-z]\w?=)?",
    re.IGNORECASE,
)
_SEGMENT = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ANOTHER = re.compile(r",?\s*(?:or\b|(?:and\b|[,/])\s*[-+$\\(\d])")  # answer behind a formula
_BARE_NUMBER = re.compile(r"[-+−]?[$]?[\d.,/]{1,60}%?")

_EMPHASIS = "*_ \t\r\n"

MAX_JOINED_BOXES = 10
MAX_JOIN_CHARS = 40
MAX_LEAD_CHARS = 60
MAX_NESTING = 60
MAX_LABELLED_CHARS = 2000
MAX_BARE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    text: str  # as written, delimiters of the statement left out
    rule: str  # box | tag | label | prose | bare


class NoAnswer(Exception):
    """The text says why there is none."""


def find_answer(response: str) -> Answer:
    """The answer that `response` gives, or `NoAnswer`."""
    text = final_part(response)
    boxes = [match.start() for match in _BOX.finditer(text)]
    tags = list(_TAG.finditer(text))
    labels = _labels(text, before=min([*boxes, *(tag.start() for tag in tags)], default=len(text)))
    last_box = boxes[-1] if boxes else -1
    last_label = labels[-1].start() if labels else -1
    last_tag = tags[-1].start() if tags else -1
    last = max(last_box, last_label, last_tag)
    if last < 0:
        return _weak_answer(text)
    if last == last_box:
        return _boxed(text, boxes)
    if last == last_label:
        return _labelled(text, labels[-1].end())
    return _tagged(text, tags[-1].end())


def count_statements(response: str) -> int:
    """Boxes, labels and tags of the final part; a box within a label or a tag is not one more."""
    text = final_part(response)
    places = [match.start() for match in _BOX.finditer(text)]
    tags = list(_TAG.finditer(text))
    labels = _labels(text, before=min([*places, *(tag.start() for tag in tags)], default=len(text)))
    outer = [match.end() for match in (*labels, *tags)]
    inner = sum(any(not text[end:place].strip("$*_ \n(\\[") for end in outer) for place in places)
    return len(places) + len(outer) - inner


def _labels(text: str, *, before: int) -> list[re.Match[str]]:
    """The labels that count: all that begin `before` a place, and those that begin a clause."""
    return [
        match
        for match in _LABEL.finditer(text)
        if match.start() < before
        or _CLAUSE_BEGIN.search(text, max(0, match.start() - MAX_LEAD_CHARS), match.start())
    ]


def final_part(response: str) -> str:
    """What follows the reasoning; `NoAnswer` when that never ends."""
    ends = list(_REASONING_END.finditer(response))
    text = response[ends[-1].end() :] if ends else response
    if _REASONING_START.search(text):
        raise NoAnswer("the reasoning never ends")
    return text


def _boxed(text: str, starts: list[int]) -> Answer:
    """The last box, and those joined to it by a comma, "and" or "or"."""
    if _DENIED.search(text[max(0, starts[-1] - MAX_JOIN_CHARS) : starts[-1]]):
        raise NoAnswer("a box that the text denies")
    content, _ = _box_content(text, starts[-1])
    contents, right = [content], starts[-1]
    for start in reversed(starts[-MAX_JOINED_BOXES:-1]):
        try:
            content, end = _box_content(text, start)
        except NoAnswer:
            break
        if not 0 <= right - end <= MAX_JOIN_CHARS or not _is_join(text[end:right]):
            break
        if content not in contents:
            contents.append(content)
        right = start
    return Answer(", ".join(reversed(contents)), "box")


def _is_join(between: str) -> bool:
    return _JOIN.fullmatch(_JOIN_FRAME.sub("", between)) is not None


def _box_content(text: str, start: int) -> tuple[str, int]:
    match = _BOX.match(text, start)
    assert match is not None
    begin = match.end()
    if not text.startswith("{", begin):
        bare = _BARE_BOX.match(text, begin)
        if bare is None:
            raise NoAnswer("an empty box")
        return bare.group().rstrip(".,"), bare.end()
    end = _closing_brace(text, begin)
    if end < 0:
        raise NoAnswer("a box that never ends")
    content = text[begin + 1 : end].strip()
    if not content:
        raise NoAnswer("an empty box")
    return content, end + 1


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _closing_brace(text: str, begin: int) -> int:
    depth = 0
    for match in _BRACE.finditer(text, begin):
        if match.group() == "{":
            depth += 1
            if depth > MAX_NESTING:
                raise NoAnswer(f"braces nested deeper than {MAX_NESTING}")
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _labelled(text: str, begin: int) -> Answer:
    """The rest of the line behind a label, or the next line with anything on it."""
    rest = text[begin : begin + MAX_LABELLED_CHARS].lstrip()
    line = _SENTENCE_END.split(rest, maxsplit=1)[0]
    if len(line) == len(rest) and len(text) > begin + MAX_LABELLED_CHARS:
        raise NoAnswer(f"a labelled answer of more than {MAX_LABELLED_CHARS} characters")
    line = re.split(r"</|<[|｜]", line, maxsplit=1)[0].replace("(without quotes)", "")
    value = _only_formula(_without_explanation(line.strip(_EMPHASIS)))
    if not value.strip("*_`$. "):
        raise NoAnswer("a label without an answer")
    return Answer(value, "label")


def _without_explanation(line: str) -> str:
    """What stands before ", since 6 fails" or "(see above)"; all of it where that part hedges."""
    found = _EXPLANATION.search(line)
    if found is None and (found := _APPROXIMATION.search(line)) is not None:
        found = None if _DECIMAL.fullmatch(line, 0, found.start()) else found
    if found is None or not found.start() or _HEDGE.search(line, found.start()):
        return line
    return line[: found.start()].strip(_EMPHASIS)


def _tagged(text: str, begin: int) -> Answer:
    end = _TAG_END.search(text, begin)
    if end is None:
        raise NoAnswer("an answer tag that never ends")
    value = text[begin : end.start()].strip(_EMPHASIS)
    if not value:
        raise NoAnswer("an empty answer tag")
    if len(value) > MAX_LABELLED_CHARS:
        raise NoAnswer(f"an answer tag around {len(value)} characters")
    return Answer(_only_formula(value), "tag")


def _only_formula(value: str) -> str:
    """The one formula among words without digits ("the sum is $13$ dollars"), else all of it."""
    segments = list(_SEGMENT.finditer(value))
    if len(segments) != 1:
        return value
    found = segments[0]
    around = value[: found.start()] + value[found.end() :]
    if re.search(r"\d|\\[a-zA-Z]|\b(?:or|and)\b", around):
        return value
    return next(group for group in found.groups() if group)


def _weak_answer(text: str) -> Answer:
    found = list(_PROSE.finditer(text))
    if found:
        rest = text[found[-1].end() :][:MAX_LABELLED_CHARS].lstrip()
        segment = _SEGMENT.match(rest)
        if segment and not _ANOTHER.match(rest, segment.end()):
            return Answer(next(group for group in segment.groups() if group), "prose")
        value = _CLAUSE_END.split(_SENTENCE_END.split(rest, maxsplit=1)[0], maxsplit=1)[0]
        value = value.strip(_EMPHASIS)
        if value:
            return Answer(value, "prose")
    bare = text.strip(_EMPHASIS)
    if 0 < len(bare) <= MAX_BARE_CHARS and "\n" not in bare:
        segment = _SEGMENT.fullmatch(bare)
        if segment or _BARE_NUMBER.fullmatch(bare):
            return Answer(bare, "bare")
    raise NoAnswer("no box, label or statement of an answer")
