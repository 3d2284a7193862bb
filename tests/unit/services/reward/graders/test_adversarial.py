r"""Answers made up to be mistaken for the gold, or to be missed; each goes into a box."""

import pytest

from services.reward.graders import aime, integers
from services.reward.graders.extraction import NoAnswer, find_answer
from services.reward.graders.format import grade as grade_format
from services.reward.graders.math import grade
from shared.messages import Score, Unparseable

RIGHT = [
    ("12:30", "12:30"), (r"12\text{:}30", "12:30"), ("7:05 PM", "7:05 p.m."), ("7:05 PM", "19:05"),
    ("12:10 am", "0:10"), (r"\frac{3}{4}", "0.75"), (r"75\%", "0.75"), ("0.75", r"75\%"),
    (r"x=\frac{3}{4}", ".75"), ("1{,}000{,}000", "10^6"), (r"5 \times 10^3", "5000"),
    (r"\$5", "5"), ("5 dollars", r"\$5"), (r"\text{5}", "5"), (r"\mathbf{5}", "5"), ("5 m", "5"),
    ("9.8 m/s^2", "9.8"), ("60 km/h", "60"), ("5 g", "5 g"), (r"5\,\text{cm}^2", "5"),
    (r"30^{\circ}", "30"), ("(1,2),(3,4)", "(3,4),(1,2)"), (r"\{(1,2),(3,4)\}", "(1,2),(3,4)"),
    (r"(-\infty,0)\cup(0,\infty)", r"x\ne 0"), ("x<3", r"(-\infty,3)"), ("1 1/2", "3/2"),
    (r"-1\frac12", "-1.5"), ("−½", "-0.5"), ("٣", "3"), ("①", "1"), ("3+4=7", "7"),
    ("2^{100}", "1267650600228229401496703205376"), ("10!", "3628800"), ("5!!", "15"),
    ("a=1,b=2", "b=2, a=1"), ("1,2", "a=1,b=2"), ("x=1 or x=2", "1,2"), ("6:8", "3:4"),
    (r"0.1\overline{6}", "1/6"), (r"0.\overline{3}", r"\frac13"), (r"0.\dot{3}", "1/3"),
    ("12_{5}", "12_5"), (r"\ln 2", r"\ln(2)"), (r"\log 100", "2"), ("i", r"\sqrt{-1}"),
    ("x^2 + y^2 = 4", "4 = x^2+y^2"), ("2x - y + 1 = 0", "y=2x+1"), ("0.5x", r"\frac{x}{2}"),
    (r"50 \text{ square units}", "50"), (r"7 \text{ and } 8", "7, 8"), ("Yes.", "yes"),
]  # fmt: skip

WRONG = [
    ("12:30", "1230"), ("12:30", "12.5"), ("0:30", "30"), ("7:05 AM", "7:05 PM"), ("7:05", "7.05"),
    ("7:05 AM", "19:05"), ("1:30", "90"), ("1:2:3", "1:3:2"), ("75", "0.75"), (r"0.75\%", r"75\%"),
    ("0.5", "50"), ("100", "1"), ("5", "5x"), (r"\pm 5", "5"), ("5", r"\pm5"), ("5 or -5", "5"),
    ("5, maybe 6", "5"), ("5 (or 6)", "5"), ("not 5", "5"), (r"\neq 5", "5"), (r"x \neq 5", "5"),
    (">5", "5"), ("x>5", "5"), (r"\le 5", "5"), (r"\approx 5.1", "5"), ("about 5 or 6", "5"),
    ("5/6 or 6/5", "5/6"), ("5 to 6", "5"), ("5-6", "5"), ("between 5 and 6", "5"), ("5, 5", "5"),
    ("5;6", "5"), ("13=14", "13"), ("13=14", "14"), ("2+2=5", "5"), ("x=5=6", "6"), ("5=6", "6"),
    ("(1,2)", "[1,2]"), ("(1,2)", r"\{1,2\}"), ("(2,1)", r"\{1,2\}"), ("1,2", "(2,1)"),
    ("(1,2,3)", "(1,2)"), ("[1,2)", "[1,2]"), (r"\{1\}", r"\{1,2\}"), (r"\emptyset", "0"),
    ("1 1/2", "11/2"), ("11/2", "1 1/2"), (r"-1\frac12", "-0.5"), (r"3\frac{1}{2}", r"\frac{3}{2}"),
    ("9999999999999999", "10000000000000000"), ("0.30000000000000004", "0.3"), ("1e-30", "0"),
    ("1.0000001", "1"), (r"\frac{10^{20}+1}{10^{20}}", "1"), (r"\sqrt{2}", "1.414"),
    ("2^{1000}+1", "2^{1000}"), (r"\frac{1}{3}", "0.3333"), (r"0.\overline{3}", "0.3"),
    ("5 cm", "5 m"), ("5 m", "5 cm"), ("5 kg", "5 lb"), ("5 hours", "5 minutes"), ("5 h", "5 min"),
    (r"5\text{ feet}", "5 inches"), (r"\$5", "5 cents"), ("5€", r"\$5"), ("x=5", "y=5"),
    ("a=1,b=2", "a=2,b=1"), ("n+1", "n"), (r"\text{A}", "B"), ("A, B", "A"), ("A or B", "A"),
    ("(A) and (B)", "A"), ("(A), (B)", "A"), (r"\text{(A)} \text{ or } \text{(B)}", "A"),
    ("(A) (B)", "A"), ("AB", "BA"), ("ABC", "ACB"), ("not even", "even"), ("12_5", "12_6"),
    ("0x10", "16"), ("10_{2}", "2_{10}"), (r"\infty", r"-\infty"), ("DNE", "0"), ("NaN", "0"),
    (r"\text{no solution}", "0"), ("0", r"\text{no solution}"), (r"\frac{0}{0}", "1"),
    ("5!", "5"), ("3!!", "720"), (r"\lfloor 2.5\rfloor", "2.5"), (r"\sqrt{4}", "-2"),
    (r"\sqrt{-4}", "2"), ("i^2", "1"), ("5 6", "56"), ("1 000", "1"), ("1,23", "123"),
    ("1.234", "1234"), ("1,2,3", "123"), ("1.5", "1,5"), ("12,34", "1234"), ("0,5", "0.5"),
    (r"5 \text{ if } x>0", "5"), (r"5 \text{ or more}", "5"), ("at least 5", "5"), ("5 + C", "5"),
    ("O(n)", "n"), (r"5 \pmod 7", "12"), ("f(x)=x^2", "f(x)=x^3"), ("y=2x+3", "y=2x-3"),
]  # fmt: skip


def value(answer: str, gold: str) -> float | None:
    outcome = grade(f"So $\\boxed{{{answer}}}$.", gold)
    return outcome.value if isinstance(outcome, Score) else None


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_the_same_answer_is_recognised(answer: str, gold: str) -> None:
    assert value(answer, gold) == 1.0


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_another_answer_never_scores(answer: str, gold: str) -> None:
    assert not value(answer, gold)


@pytest.mark.parametrize(
    "response",
    [
        r"The answer is not \boxed{5}",
        r"It isn't $\boxed{5}$.",
        r"x \neq \boxed{5}",
        r"so it is **not** $\boxed{5}$",
    ],
)
def test_a_box_that_the_text_denies_is_no_answer(response: str) -> None:
    with pytest.raises(NoAnswer, match="denies"):
        find_answer(response)


@pytest.mark.parametrize(
    "answer",
    [
        "18",
        r"\$18",
        "$18",
        "18 dollars",
        "18.0",
        "18.00",
        "x=18",
        "9+9=18",
        "18 quarters",
        "18 fifth graders",
    ],
)
def test_whole_numbers_are_read_with_what_people_write_around_them(answer: str) -> None:
    assert integers.grade(f"Thus\n#### {answer}", "18").value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("answer", ["17", "-18", "180", "1,8", "18.5", "1.8e2"])
def test_other_whole_numbers_score_nothing(answer: str) -> None:
    outcome = integers.grade(f"#### {answer}", "18")
    assert not (isinstance(outcome, Score) and outcome.value)


def test_huge_integers_are_compared_to_the_last_digit() -> None:
    gold = "7" * 3000
    assert integers.grade(rf"\boxed{{{gold}}}", gold).value == 1.0  # type: ignore[union-attr]
    assert integers.grade(rf"\boxed{{{gold[:-1]}8}}", gold).value == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("answer", ["13=14", "14=13=14", "13 or 14", "13, 14", r"13\text{ or }14"])
def test_hedged_integers_are_no_answer(answer: str) -> None:
    for gold in ("13", "14"):
        assert isinstance(aime.grade(rf"\boxed{{{answer}}}", gold), Unparseable)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>so</think> The answer is \boxed{5}.", 1.0),
        (r"Answer: $\boxed{5}$", 1.0),
        ("#### 5", 1.0),
        (r"\boxed{5} or \boxed{6}", 0.0),
        (r"Answer: 5. Or \boxed{6}", 0.0),
        ("The answer is 5.", 0.0),
        (r"<think>so \boxed{5}", 0.0),
        (r"\boxed{5", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_closed_reasoning_and_one_statement(response: str, expected: float) -> None:
    outcome = grade_format(response, "")
    assert isinstance(outcome, Score)
    assert outcome.value == expected
