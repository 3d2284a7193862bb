"""Whether a response has the form that was asked for, whatever it says; there is no gold.

1 for reasoning that is closed (if there is any) and exactly one readable statement of an answer
behind it: a box, a label, a tag. 0 otherwise; never `unparseable`.
"""

from services.reward.graders.extraction import NoAnswer, count_statements, find_answer
from shared.messages import Score, Unparseable

STRICT = ("box", "tag", "label")


def grade(response: str, gold: str) -> Score | Unparseable:
    try:
        found = find_answer(response)
    except NoAnswer as err:
        return Score(value=0.0, reason=str(err))
    if found.rule not in STRICT:
        return Score(value=0.0, extracted=found.text[:80], reason="no box, label or tag")
    if (number := count_statements(response)) > 1:
        return Score(value=0.0, extracted=found.text[:80], reason=f"{number} statements")
    return Score(value=1.0, extracted=found.text[:80], reason=found.rule)
