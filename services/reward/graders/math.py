r"""Mathematical answers: a written policy around math-verify.

What counts as the answer: `extraction.py`. How an answer is compared with the gold:

* Text that is the same after `notation.tidy` is right, before anything is evaluated.
* Numbers are compared exactly, whatever their size. A decimal also equals an exact value that it
  rounds correctly with at least six significant digits: 0.333333 is 1/3, 0.333 is not.
* A percent sign or none: `50\%` equals 50 and 1/2; two percentages compare as they are.
* Units, degrees, currency and number bases are ignored unless both sides name one and they differ.
  Number words are no units: `5 million` is 5000000, and `5 squared` is not 5.
* Several answers (commas, "and", "or", plus-minus, sets) must match one to one, in any order: one
  of two is wrong, and so is hedging ("13 or 14"). Pairs, intervals and matrices keep their order,
  intervals their open and closed ends; conditions are read as intervals (`ranges.py`).
* `200,100` is one number or two, whichever the other side is (`notation.readings`).
* `x = 5` is 5. `x = 5` is not `y = 5`. Of a chain of equations the last side counts where the
  first names it (`m + n = 5`; `equations.py`), unless an earlier side is another number: `13 = 14`
  is neither, and `2x = 5` is no 5.
* Clock times are texts, and `7:05 pm` is also 19:05. Where the gold has no two digits behind its
  colon it is a ratio, which may be reduced, and written as a fraction.
* Words and choices ignore case and `\text`: `\text{(B)}` is B. Of an answer that gives letter and
  value, `\text{(B)}\ 5`, the letter is compared where the gold is one, else the value.
* Everything else is algebra (`algebra.py`).

An answer that is found but cannot be read is `unparseable`. One too large to evaluate is wrong
(`screen.py`) when the gold is not. A gold that cannot be read is an error, never a zero.
"""

import re
from functools import lru_cache

from services.reward.graders.algebra import refuse_large_gold, same_by_verify, same_value
from services.reward.graders.brackets import without_groups
from services.reward.graders.equations import is_name, sides
from services.reward.graders.extraction import NoAnswer, find_answer
from services.reward.graders.forms import (
    Assigned,
    Form,
    Group,
    Leaf,
    Unreadable,
    is_relation,
    read_form,
    split_choice,
)
from services.reward.graders.literals import Number, same_number, share
from services.reward.graders.notation import readings
from services.reward.graders.screen import TooLarge
from shared.messages import Score, Unparseable

MAX_EXTRACTED_CHARS = 200

_EMPTY = "\\emptyset"
_SYMBOL = re.compile(
    r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|varphi"
    r"|psi|omega|Delta|Gamma|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 for the gold's value, 0 for another, `Unparseable` without a readable answer.

    ValueError: the gold is empty or cannot be read.
    """
    golds = _read_gold(gold)
    try:
        found = find_answer(response)
    except NoAnswer as err:
        return Unparseable(reason=str(err))
    answers = readings(found.text)
    if not answers[0]:
        return Unparseable(reason="an empty answer")
    try:
        is_right, reason = _compare_readings(golds, answers)
    except Unreadable as err:
        return Unparseable(reason=str(err))
    return Score(
        value=float(is_right),
        extracted=answers[0][:MAX_EXTRACTED_CHARS],
        reason=f"{found.rule}: {reason}",
    )


@lru_cache(maxsize=512)
def _read_gold(gold: str) -> tuple[Form, ...]:
    try:
        texts = readings(find_answer(gold).text if "boxed" in gold else gold)
        if not texts[0]:
            raise ValueError("the gold is empty")
        return tuple(map(read_form, texts))
    except (NoAnswer, Unreadable) as err:
        raise ValueError(f"gold {gold[:80]!r}: {err}") from err


def _compare_readings(golds: tuple[Form, ...], answers: tuple[str, ...]) -> tuple[bool, str]:
    """Right if any reading of the answer is any of the gold: `100,200` against `200, 100`."""
    compared = [_compare(gold, answer) for gold in golds for answer in answers]
    return max(compared, key=lambda one: one[0])


def _compare(gold: Form, answer: str) -> tuple[bool, str]:
    if answer == gold.text:
        return True, "same text"
    letter, value = split_choice(answer)
    if letter:  # `\textbf{(B)}\ 5`: the letter is compared where the gold is one
        answer = letter if isinstance(gold, Leaf) and len(gold.word) == 1 else value
    try:
        return same(gold, read_form(answer)), "compared by value"
    except TooLarge as err:
        refuse_large_gold(gold.text)
        return False, f"too large to evaluate: {err}"


def same(gold: Form, answer: Form) -> bool:
    """Whether two shapes hold the same values."""
    if gold.text == answer.text:
        return True
    if isinstance(gold, Assigned) or isinstance(answer, Assigned):
        return _same_assigned(gold, answer)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_group(gold, answer)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return same_leaf(gold, answer)
    return _same_across(gold, answer)


def _same_assigned(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Assigned) and isinstance(answer, Assigned):
        if (gold.variable, gold.value.text) == (answer.value.text, answer.variable):  # x = y
            return True
        return gold.variable == answer.variable and same(gold.value, answer.value)
    if isinstance(answer, Assigned):
        if isinstance(gold, Leaf) and is_relation(gold.value):
            return same_by_verify(gold.text, answer.text)
        return same(gold, answer.value)
    assert isinstance(gold, Assigned)
    if isinstance(answer, Leaf) and is_relation(answer.value):
        return same_by_verify(gold.text, answer.text)
    return same(gold.value, answer)


def _same_group(gold: Group, answer: Group) -> bool:
    kinds = {gold.kind, answer.kind}
    if kinds <= {"list", "set"}:
        if _names_each(gold) != _names_each(answer):  # `2, 1` for `x=2, y=1`
            return _same_ordered(gold.items, answer.items)
        return _same_unordered(gold.items, answer.items)
    if any(one.kind == "union" and _has_ranges(one) for one in (gold, answer)):
        return kinds <= {"union", "list"} and _same_unordered(gold.items, answer.items)
    if kinds == {"union"}:
        return _same_unordered(gold.items, answer.items) or same_by_verify(gold.text, answer.text)
    if kinds == {"bracket"}:
        return gold.brackets == answer.brackets and _same_ordered(gold.items, answer.items)
    if kinds in ({"matrix"}, {"row"}):
        return _same_ordered(gold.items, answer.items)
    if kinds == {"union", "list"}:  # `(-\infty,0) \text{ or } (1,\infty)`
        has_ranges = _has_ranges(gold) or _has_ranges(answer)
        return not has_ranges and _same_unordered(gold.items, answer.items)
    if kinds == {"bracket", "list"}:  # a pair without its parentheses, or a list within some
        bracket = gold if gold.kind == "bracket" else answer
        return bracket.brackets == "()" and _same_ordered(_in_order(gold), _in_order(answer))
    if kinds == {"bracket", "union"}:
        return same_by_verify(gold.text, answer.text)
    return False


def _names_each(group: Group) -> bool:
    """Whether each item is assigned to a variable of its own."""
    names = {item.variable for item in group.items if isinstance(item, Assigned)}
    return len(names) == len(group.items) > 1


def _in_order(group: Group) -> tuple[Form, ...]:
    """Its items, coordinates by name: `y=3, x=2` is (2,3)."""
    named = [item for item in group.items if isinstance(item, Assigned)]
    if len(named) < len(group.items) or not {item.variable for item in named} <= set("xyz"):
        return group.items
    return tuple(sorted(named, key=lambda item: item.variable))


def _has_ranges(group: Group) -> bool:
    """Whether its items are inequalities, all or some."""
    return any(isinstance(item, Leaf) and is_relation(item.value) for item in group.items)


def _same_ordered(gold: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
    return len(gold) == len(answer) and all(map(same, gold, answer))


def _same_unordered(gold: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
    """One to one in any order; equality is transitive, so the first partner is as good as any."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        partner = next((other for other in left if same(item, other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _same_across(gold: Form, answer: Form) -> bool:
    """A leaf against a group: an inequality may be an interval, a set of one its element."""
    leaf, group = (gold, answer) if isinstance(gold, Leaf) else (answer, gold)
    assert isinstance(leaf, Leaf)
    assert isinstance(group, Group)
    if group.kind in {"set", "list"} and len(group.items) == 1:
        if _EMPTY in (leaf.value, group.items[0].text):  # the set that holds the empty one
            return False
        return same(gold, group.items[0]) if group is answer else same(group.items[0], answer)
    if leaf.number is not None or leaf.word or leaf.clock or group.kind in {"list", "matrix"}:
        return False
    return same_by_verify(gold.text, answer.text)


def same_leaf(gold: Leaf, answer: Leaf) -> bool:
    """Whether two single values are equal, by the rules at the top of this module."""
    if gold.clock or answer.clock:
        return _same_clock(gold, answer)
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.word and answer.word and gold.word == answer.word:
        return True
    if _settled_by_words(gold, answer):
        return False
    if gold.number is not None and answer.number is not None:
        return _same_percent(gold.number, answer.number, gold, answer)
    if "=" in without_groups(answer.value) and not is_relation(gold.value):
        return _is_last_side(gold, sides(answer.value))
    return same_value(gold, answer)


def _is_last_side(gold: Leaf, chain: list[str]) -> bool:
    """Whether a chain of equations ends with the gold: no side is another number (`13 = 14`).

    The first side is a name or has the gold's value itself; `2x = 5` does not say 5.
    """
    if not chain or not same(gold, read_form(chain[-1])):
        return False
    first, *_ = earlier = chain[:-1]
    checked = [side for side in earlier if _is_number(side)]
    if not _is_number(first) and not is_name(first):
        checked.append(first)
    return all(same(gold, read_form(side)) for side in checked)


def _is_number(side: str) -> bool:
    """Without symbols, or with a unit for them."""
    form = read_form(side) if _SYMBOL.search(side) else None
    return form is None or (isinstance(form, Leaf) and form.number is not None)


def _settled_by_words(gold: Leaf, answer: Leaf) -> bool:
    """Words against other words, or words against a number: no algebra needed."""
    if gold.is_textual or answer.is_textual:
        return True
    words, numbers = (gold.word, answer.word), (gold.number, answer.number)
    return len(max(words, key=len)) > 1 and numbers != (None, None)


def _same_percent(left: Number, right: Number, gold: Leaf, answer: Leaf) -> bool:
    if same_number(left, right):
        return True
    if gold.is_percent == answer.is_percent or left.value is None or right.value is None:
        return False
    return same_number(
        share(left) if gold.is_percent else left, right if gold.is_percent else share(right)
    )


def _same_clock(gold: Leaf, answer: Leaf) -> bool:
    """Times of day, or ratios; the gold tells which."""
    if not gold.clock or not answer.clock:
        return _same_ratio(gold, answer)
    left, right = _parts(gold.clock), _parts(answer.clock)
    halves = gold.clock[3], answer.clock[3]
    is_24_hours = max(left[0], right[0]) > 12 or min(left[0], right[0]) == 0
    if bool(halves[0]) != bool(halves[1]) and is_24_hours:
        return _hours_24(left, halves[0]) == _hours_24(right, halves[1])
    if left == right:
        return halves[0] == halves[1] or not (halves[0] and halves[1])
    is_time = _is_time(gold.clock) or bool(answer.clock[2] or answer.clock[3])
    return not is_time and left[0] * right[1] == left[1] * right[0] != 0


def _same_ratio(gold: Leaf, answer: Leaf) -> bool:
    """`3:5` is 3/5; a time of day is no number."""
    ratio, other = (gold, answer) if gold.clock else (answer, gold)
    number, (over, under, _) = other.number, _parts(ratio.clock)
    if number is None or number.value is None or number.places is not None or not under:
        return False
    is_fraction = number.value.denominator > 1 and not other.unit
    return is_fraction and not _is_time(ratio.clock) and over == number.value * under


def _is_time(clock: tuple[str, ...]) -> bool:
    hours, minutes, _ = _parts(clock)
    written = len(clock[1]) == 2 and hours <= 24 and minutes < 60
    return written or bool(clock[2] or clock[3])


def _parts(clock: tuple[str, ...]) -> tuple[int, int, int]:
    hours, minutes, seconds = (int(part or 0) for part in clock[:3])
    return hours, minutes, seconds


def _hours_24(time: tuple[int, ...], half: str) -> tuple[int, ...]:
    """A time of day on the 24 hour clock; `half` is a, p or nothing."""
    hour = time[0] % 12 + (12 if half == "p" else 0) if half else time[0]
    return hour, *time[1:]
