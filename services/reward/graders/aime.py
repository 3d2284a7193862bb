"""AIME answers: an integer from 0 to 999, compared exactly (`integers.py`); padding is ignored."""

from services.reward.graders.integers import grade_integer
from shared.messages import Score, Unparseable

MAX_ANSWER = 999


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 for the gold's integer, 0 for another number. ValueError: gold is no integer 0 to 999."""
    return grade_integer(response, gold, low=0, high=MAX_ANSWER)
