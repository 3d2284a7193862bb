import pytest

from services.reward.graders.forms import Unreadable
from services.reward.graders.screen import TooLarge, screen


@pytest.mark.parametrize(
    "text",
    [r"9^{9^{9}}", "9^9^9", r"2^{100000000}", r"10^{10^{10}}", r"x^{2^{3^{4}}}", "100000!", "7!!!",
     r"9^{9}!", r"(10^5)!", r"(6!)!", r"\binom{10^7}{500}", r"\binom{9999999}{5}",
     r"{9^{9}}^{9^{9}}", r"\sum_{k=1}^{10^8} k", "99999999999!", "((9^9)^9)^9999",
     r"(((9^{99})^{99})^{99})^{9}"],
)  # fmt: skip
def test_what_would_take_for_ever_is_refused(text: str) -> None:
    with pytest.raises(TooLarge):
        screen(text)


@pytest.mark.parametrize(
    "text",
    [r"1999^{1999}", r"2^{10^{3}}", r"2^{2^{3}}", "100!", r"(101!)^{100}", r"\frac{n!}{2}",
     "(x!)^k", r"\binom{99}{49}", r"x^{10}", r"e^{-x^2}", r"x^{x^{x}}", r"a^{-1}", "5!!",
     r"\sum_{k=1}^{100} k", r"\frac{1}{2^{98}}", r"n^{2}+n^{3}", "2^n", "x^", r"x^{", "!", ")!",
     "(x^2)^3", "(e^x)^2", r"(2^{5})^{2}"],
)  # fmt: skip
def test_what_people_write_passes(text: str) -> None:
    screen(text)


@pytest.mark.parametrize("text", ["x+" * 300, "(" * 13 + "x" + ")" * 13, r"\sin(" * 20])
def test_what_is_no_answer_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        screen(text)
