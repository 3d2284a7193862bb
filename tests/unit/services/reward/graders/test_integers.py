import pytest

from services.reward.graders import aime, arithmetic, integers
from shared.messages import Score, Unparseable


@pytest.mark.parametrize(
    "answer",
    ["73", "073", "73.", "73.0", "n = 73", r"73^\circ", "$73$", "７３", r"73\text{ degrees}",
     "73 units", "m+n=33+40=73"],
)  # fmt: skip
@pytest.mark.parametrize("gold", ["73", "073", r"73^\circ"])
def test_aime_reads_the_same_integer_on_both_sides(answer: str, gold: str) -> None:
    assert aime.grade(rf"\boxed{{{answer}}}", gold).value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("answer", ["74", "-73", "730", "7.3", "73.5", "1073", "9" * 3000, "073.1"])
def test_aime_scores_other_numbers_zero(answer: str) -> None:
    outcome = aime.grade(rf"\boxed{{{answer}}}", "073")
    assert isinstance(outcome, Score)
    assert outcome.value == 0.0


@pytest.mark.parametrize(
    "answer",
    ["73 thousand", "73 squared", "73 dozen", r"73\text{ million}", "73 halves", "73 and a half"],
)
def test_number_words_make_another_number(answer: str) -> None:
    for outcome in (
        aime.grade(rf"\boxed{{{answer}}}", "73"),
        integers.grade(f"#### {answer}", "73"),
    ):
        assert isinstance(outcome, Score)
        assert outcome.value == 0.0
    outcome = integers.grade("#### 73 thousand dollars", "73000")
    assert isinstance(outcome, Score)
    assert outcome.value == 1.0


@pytest.mark.parametrize(
    "answer",
    [r"\frac{146}{2}", "x", r"70 \text{ or } 73", "70, 73", "9^{9^9}", "{" * 50_000, "9" * 5000],
)
def test_aime_leaves_other_text_unparseable(answer: str) -> None:
    assert isinstance(aime.grade(f"Answer: {answer}", "073"), Unparseable)


@pytest.mark.parametrize("gold", ["", "1000", "-1", "1/2", "x", "73.5"])
def test_aime_refuses_a_gold_that_is_no_answer(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        aime.grade(r"\boxed{1}", gold)


@pytest.mark.parametrize(
    ("response", "value"),
    [("7+8=15;3+4+1=08;85", 1.0), ("85", 1.0), (";;085", 1.0), ("85;84", 0.0), ("-85", 0.0)],
)
def test_arithmetic_compares_the_last_field(response: str, value: float) -> None:
    assert arithmetic.grade(response, "85") == Score(
        value=value, extracted=response.rpartition(";")[2]
    )


@pytest.mark.parametrize(
    "response",
    [
        "",
        ";",
        "7+8=15;",
        "85 ",
        " 85",
        "85.",
        "8 5",
        "+85",
        "85\n",
        "٨٥",
        "1e2",
        "x",
        "9" * 100_000,
    ],
)
def test_arithmetic_leaves_anything_else_unparseable(response: str) -> None:
    assert isinstance(arithmetic.grade(response, "85"), Unparseable)


def test_arithmetic_refuses_a_gold_that_is_no_integer() -> None:
    with pytest.raises(ValueError, match="gold 'x'"):
        arithmetic.grade("85", "x")
