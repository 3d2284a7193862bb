r"""Cases by kind, each as (answer, gold); the answer is put in a box."""

import contextlib
import random

import pytest

from services.reward.graders.math import grade
from shared.messages import Score, Unparseable


def verdict(response: str, gold: str) -> float | None:
    outcome = grade(response, gold)
    return outcome.value if isinstance(outcome, Score) else None


def boxed(answer: str, gold: str) -> float | None:
    return verdict(f"So we get $\\boxed{{{answer}}}$.", gold)


EQUAL = {
    "signs": [
        ("-7", "-7"), ("- 7", "-7"), ("−7", "-7"), ("–7", "-7"), ("+7", "7"), ("-(-7)", "7"),
        (r"-\frac{2}{5}", r"\frac{-2}{5}"), (r"\frac{2}{-5}", r"-\frac{2}{5}"), ("-0", "0"),
    ],
    "integers": [
        (r"\approx 42", "42"), ("≈42", "42"), ("= 42", "42"), ("about 42", "42"),
        ("042", "42"), ("42", "042"), ("42.", "42"), ("42.0", "42"), ("1,234", "1234"),
        ("1234", "1,234"), (r"1{,}234{,}567", "1234567"), (r"10,\!080", "10080"),
        (r"10\,080", "10080"), ("1 234 567", "1234567"), ("７３", "73"), ("٧٣", "73"),
        ("7" * 5000, "7" * 5000), ("0" + "7" * 5000, "7" * 5000), ("1e3", "1000"),
        (r"1999^{1999}", r"1999 \cdot 1999^{1998}"), (r"2^{10}", "1024"), (r"5!", "120"),
        (r"\binom{6}{2}", "15"), (r"6.02\times10^{23}", r"602 \times 10^{21}"),
    ],
    "fractions": [
        (r"\frac34", r"\dfrac{3}{4}"), (r"\frac 3 4", r"\tfrac{3}{4}"), ("3/4", "0.75"),
        (".75", r"\frac{3}{4}"), (r"\frac{6}{8}", "3/4"), (r"2\frac{3}{4}", r"\frac{11}{4}"),
        ("2 3/4", r"\frac{11}{4}"), ("2¾", "2.75"), ("½", "1/2"), (r"-2\frac{1}{2}", "-2.5"),
        (r"\frac{0.5}{2}", "0.25"), ("0.333333", r"\frac{1}{3}"), (r"\frac{1}{3}", "0.333333"),
        (r"\left(\frac{1}{2}\right)", "0.5"), (r"\frac{270}7", r"\frac{270}{7}"),
    ],
    "roots and constants": [
        (r"\sqrt2", r"\sqrt{2}"), ("√2", r"\sqrt{2}"), ("sqrt(2)", r"\sqrt{2}"),
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"), (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"3\pi", r"3 \cdot \pi"), ("3π", r"3\pi"), ("3*pi", r"3\pi"), (r"\sqrt[3]{8}", "2"),
        (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\cos\frac{5\pi}{12}"),
        (r"\sum_{k=1}^{3} k^2", "14"),
        (r"\log_2 8", "3"), (r"e^{\ln 5}", "5"), (r"3.14159265", r"\pi"),
        (r"e^{i\pi}", "-1"), ("3+4i", "4i + 3"), ("|3+4i|", "5"), ("i^2", "-1"),
    ],
    "expressions": [
        ("x^2+2x+1", "(x+1)^2"), ("2x + 3", "3+2x"), (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}"),
        (r"x \cdot y", "yx"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"2\sin x\cos x", r"\sin(2x)"),
        ("x²", "x^2"), (r"2^{n+1}", r"2\cdot 2^n"), (r"a^{-1}", r"\frac{1}{a}"), ("x**2", "x^2"),
        (r"(a+5)(b+2)", r"ab+2a+5b+10"), (r"\cot x", r"\frac{\cos x}{\sin x}"),
    ],
    "units": [
        (r"5\text{ cm}", "5"), ("5", r"5\text{ cm}"), (r"5\ \mathrm{cm}", "5 cm"), ("5cm", "5"),
        (r"12\mbox{ inches}^2", r"12 \text{ square inches}"), ("13 apples", "13"),
        (r"\$18.90", "18.90"), (r"\$1,250", "1250"), ("18.9 dollars", r"\$18.90"), ("€5", "5"),
        (r"5.4 \text{ cents}", "5.4"), ("3.5 hours", "3.5"), (r"60\text{ mph}", "60"),
        (r"52_8", "52_{8}"), ("52", "52_8"), (r"\frac{3}{4}\text{ mile}", "0.75"),
        ("5 million", "5000000"), (r"2.5\text{ million dollars}", r"\$2500000"), ("3 dozen", "36"),
        ("9.8 meters per second squared", "9.8"),
    ],
    "percent and degrees": [
        (r"50\%", "50"), ("50", r"50\%"), (r"50\%", r"\frac{1}{2}"), ("0.5", r"50\%"),
        (r"7.5\%", r"7.5\%"), ("50 percent", r"50\%"), (r"90^\circ", "90"), ("90°", r"90^\circ"),
        (r"90^{\circ}", r"90^\circ"), (r"90\text{ degrees}", r"90^\circ"), ("90 degrees", "90"),
        (r"33\frac{1}{3}\%", r"\frac{1}{3}"), (r"\sin 30^\circ", r"\frac{1}{2}"),
        (r"\tan(45^\circ)", "1"), (r"\cos^2 60^\circ", "0.25"),
    ],
    "several answers": [
        ("2, 3", "3,2"), (r"2 \text{ and } 3", "2, 3"), (r"2\text{ or }3", "3,2"),
        ("2, 3, and 5", "2,3,5"), (r"\{3,2\}", r"\{2,3\}"), ("2, 3", r"\{2,3\}"),
        ("x=2, x=3", "x = 3, x = 2"), ("x=2,3", "2, 3"), (r"\{1,2,2\}", r"\{1,2\}"),
        (r"\pm 2", "2, -2"), ("±2", "-2,2"),
        (r"1\pm\sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}"), (r"x = 2 \text{ or } x = 3", "2, 3"),
        (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"), (r"\{5\}", "5"),
    ],
    "pairs, intervals, sets": [
        ("(1, 2)", "(1,2)"), (r"\left(1,\frac{1}{2}\right)", "(1, 0.5)"), ("1, 2", "(1,2)"),
        ("[0,1)", r"\left[0,1\right)"), ("(0, ∞)", r"(0,\infty)"), (r"x \in [-2,7]", "[-2,7]"),
        (r"(1,2)\cup(3,4)", r"(3,4) \cup (1,2)"), (r"-2 < x < 7", "(-2,7)"),
        (r"[0,1]\cup[1,2]", "[0,2]"), (r"x \geq 3", r"[3, \infty)"), (r"x \ge 3", r"x\geqslant 3"),
        (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{bmatrix} 0.5 \\ 3 \end{bmatrix}"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}"), (r"\{1,2,3\}", r"\{1,2\}\cup\{2,3\}"),
        (r"x<3 \text{ or } x>5", r"(-\infty,3)\cup(5,\infty)"), ("x<3, x>5", "x<3 or x>5"),
        (r"(5,\infty)\cup(-\infty,3)", r"x<3 \lor x>5"), ("2,1", "x=2,y=1"),
        (r"\emptyset", "∅"), (r"\langle 1,2\rangle", "(1,2)"), ("(x,y)=(2,3)", "(2,3)"),
    ],
    "equations": [
        ("x=5", "5"), ("5", "x = 5"), ("x = 5", "x=5"), ("2+3=5", "5"), ("y=2x+3", "y = 3+2x"),
        ("2x+3", "y=2x+3"), ("f(x)=x^2", "x^2"), ("x+y-1=0", "x + y = 1"),
        (r"k \ne 1", r"k \neq 1"),
    ],
    "words": [
        (r"\text{(B)}", "B"), ("B", r"\text{(B)}"), ("(b)", "B"), (r"\textbf{(C)}", r"\text{(C)}"),
        (r"\text{Yes}", "yes"), ("Evelyn", r"\text{Evelyn}"), (r"\mathrm{even}", r"\text{even}"),
        (r"\textbf{(A)}\ 5", "5"), (r"\textbf{(A)}\ 5", r"\text{(A)}"), ("B. 5", "B"),
        (r"\text{no solution}", r"\text{No solution}"),
    ],
    "clock times": [("1:05", "1:05"), ("01:05", "1:05"), (r"1{:}05", "1:05"), ("3:30 pm", "3:30"),
        ("2:4", "1:2")],
}  # fmt: skip

DIFFERENT = {
    "signs": [("7", "-7"), ("-7", "7"), (r"\frac{2}{5}", r"-\frac{2}{5}"), ("--7", "-7")],
    "integers": [
        ("149", "49"), ("49", "149"), ("42.5", "42"), ("-3", "-3.5"), ("1,234", "1,235"),
        ("7" * 5000, "7" * 4999 + "8"), ("7" * 5000, "7"), ("1000", "1"), ("420", "42"),
        (r"10^{100}+1", r"10^{100}"), ("1e4", "1000"),
    ],
    "tiny differences": [
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
        ("0.0000001", "0.0000002"), ("0.0000001", "0"), ("0.12345678", "0.12345679"),
        (r"10^{-20}", "0"), (r"\pi+10^{-9}", r"\pi"), ("1000001", "1000000"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("1-e^{-50}", "1"), ("x+10^{-20}", "x"),
        ("262537412640768744", r"e^{\pi\sqrt{163}}"), (r"\sqrt2+10^{-20}", r"\sqrt2"),
        (r"\sqrt{10^{40}+1}", "10^{20}"), (r"\pi+10^{-16}", r"\pi"),
        (r"\sin(10^{-12})", "10^{-12}"),
        (r"\frac{1000001}{1000000}", "1"), ("0.333", r"\frac{1}{3}"), ("0.333334", "1/3"),
        ("3.14", r"\pi"), (r"\frac{22}{7}", r"\pi"), ("0.67", r"\frac{2}{3}"),
    ],
    "fractions": [(r"\frac{3}{4}", r"\frac{4}{3}"), (r"2\frac{3}{4}", r"\frac{6}{4}"),
        ("31/2", "3 1/2")],
    "expressions": [
        ("x+1", "x-1"), ("|x|", "x"), ("x", "|x|"), ("x^2", "x^3"), ("x", "y"), ("2x", "2"),
        ("2", "2x"), (r"\sin x", r"\cos x"), ("2xy", "2"), ("n", "2n"), (r"\sqrt{x^2}", "x"),
        ("x+0.0001", "x"), ("6+5i", "6-5i"), (r"\sin 30", r"\frac{1}{2}"),
    ],
    "units": [
        (r"5\text{ m}", r"5\text{ cm}"), ("5 in", r"5\text{ ft}"),
        (r"5\text{ cm}^2", r"5\text{ cm}"),
        (r"6\text{ cm}", "5"), ("52_8", "52_9"),
    ],
    "number words are no units": [
        ("5 million", "5"), ("5 hundred", "5"), (r"5\text{ million dollars}", "5"),
        ("3 dozen", "3"), (r"5\text{k}", "5"),
        (r"5\text{ squared}", "5"), (r"5\text{ factorial}", "5"), ("5 halves", "5"),
        (r"5\text{ thirds}", "5"), (r"5\text{ (negative)}", "5"), ("5 negative", "5"),
        ("5 and a half", "5"), (r"5\text{ below zero}", "5"),
    ],
    "percent and degrees": [(r"5\%", r"50\%"), (r"1\%", r"100\%"), (r"45^\circ", "90")],
    "hedges and several answers": [
        (r"13 \text{ or } 14", "13"), (r"13 \text{ or } 14", "14"), ("13, 14", "13"),
        ("13 or 14", "14"), ("13", "13, 14"), ("14, 13, 12", "13, 14"), ("1, 2, 3", "2, 3, 4"),
        ("21, 36, and 82", "19, 46, 82"), ("n=1,2,3", "n=2,3,4"), (r"\pm 2", "2"), ("2", r"\pm 2"),
        (r"\{1,2\}", r"\{1,3\}"), (r"\{1,2,3\}", r"\{1,2\}"), ("13; 14", "13"),
        (r"13 \lor 14", "13"), (r"\{13, 14\}", "13"), ("(13, 14)", "13"), ("13, 13", "13"),
        ("1, 1, 2", "1, 2, 2"),
    ],
    "pairs and intervals": [
        ("(2,1)", "(1,2)"), ("[0,1)", "(0,1]"), ("[0,1]", "(0,1)"), ("(0,1)", "[0,1]"),
        ("[-1,1]", r"[-1,0)\cup(0,1]"), (r"(1,2)\cup(3,4)", "(1,4)"), ("(1,2,3)", "(1,2)"),
        (r"x > 3", r"[3,\infty)"), ("(0,1)", "0"), ("2, 1", "(1,2)"),
        ("1,2", "x=2,y=1"), ("x=2,y=1", "1,2"), (r"\{1,2\}\cup\{4\}", r"\{1,2,3\}"),
        (r"x<3 \text{ and } x>5", r"(-\infty,3)\cup(5,\infty)"),
        (r"x<3 \text{ or } x>6", r"(-\infty,3)\cup(5,\infty)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
    "equations": [("x=5", "y=5"), ("x=5", "6"), ("5=x+1", "5"), ("y=2x+3", "y=2x-3"),
        (r"k \ne 1", "k = 1"), ("x < 3", "x > 3")],
    "words": [
        ("A", "B"), (r"\text{No}", "Yes"), (r"\textbf{(A)}\ 5", r"\text{(B)}"),
        (r"\textbf{(A)}\ 5", "6"), (r"13\text{ or more}", "13"), (r"13\text{ at least}", "14"),
        (r"\text{5 or so}", "7"),
        (r"\text{odd}", r"\text{even}"),
        ("NaN", "5"), (r"\text{none}", "0"), (r"\infty", "5"), (r"\frac{1}{0}", "5"),
        (r"\text{Evelyn}", r"\text{Eve}"), ("0/0", "0"), (r"-\infty", r"\infty"),
    ],
    "clock times": [("12:00", "1:00"), ("1:05", "1:50"), ("3:30 am", "3:30 pm"), ("12:00", "12"),
        ("1:2", "2:1")],
    "too large": [
        (r"10^{5^{5^{5^{5}}}}", "7"), ("9**9**9**9", "1"), ("100000!", "0"), (r"9^{9^{9}}", "9"),
        (r"2^{100000000}", "2"), ("7!!!!", "7"), (r"10^{10^{10}}", "10"),
    ],
}  # fmt: skip


def flat(table: dict[str, list[tuple[str, str]]]) -> list[object]:
    return [
        pytest.param(answer, gold, id=f"{kind}: {answer[:24]} / {gold[:24]}")
        for kind, pairs in table.items()
        for answer, gold in pairs
    ]


@pytest.mark.parametrize(("answer", "gold"), flat(EQUAL))
def test_equal_answers_score_one(answer: str, gold: str) -> None:
    assert boxed(answer, gold) == 1.0


@pytest.mark.parametrize(("answer", "gold"), flat(DIFFERENT))
def test_other_answers_never_score(answer: str, gold: str) -> None:
    assert boxed(answer, gold) == 0.0


@pytest.mark.parametrize(
    "answer",
    ["{" * 3000 + "2" + "}" * 3000, "(" * 500 + "2" + ")" * 500, r"\frac{" * 200 + "1", "", "   "],
)
def test_what_cannot_be_read_is_unparseable(answer: str) -> None:
    assert isinstance(grade(f"\\boxed{{{answer}}}", "2"), Unparseable)


@pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", "$$"])
def test_an_empty_gold_is_an_error_even_for_an_empty_answer(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        grade(r"\boxed{}", gold)


def test_a_gold_in_a_box_or_in_dollars_is_read() -> None:
    assert boxed("5", r"$\boxed{5}$") == 1.0
    assert boxed("0.5", r"$\frac{1}{2}$") == 1.0


def test_a_gold_that_means_nothing_to_algebra_still_matches_its_text() -> None:
    assert boxed(r"\mathbb{Z}^4", r"\mathbb{Z}^4") == 1.0
    assert boxed("7", r"\mathbb{Z}^4") == 0.0
    with pytest.raises(ValueError, match="is not an expression"):
        boxed("x+7", r"\mathbb{Z}^4")


def test_a_gold_too_large_to_evaluate_matches_its_text_alone() -> None:
    assert boxed(r"9^{9^{9}}", r"9^{9^{9}}") == 1.0
    assert boxed("7", r"9^{9^{9}}") == 0.0
    for answer in (r"9^{9^{8}}", r"9^{7}"):
        with pytest.raises(ValueError, match="is too large to evaluate"):
            boxed(answer, r"9^{9^{9}}")


def test_the_outcome_says_what_was_read() -> None:
    outcome = grade("Thus $\\boxed{14}$.", "13")
    assert outcome == Score(value=0.0, extracted="14", reason="box: compared by value")


PIECES = [
    "1", "2", "13", "x", "n", "+", "-", "/", "^", "_", "{", "}", "(", ")", "[", "]", r"\frac", "0",
    r"\sqrt", r"\pi", ",", ";", "=", "<", r"\le", r"\text{ or }", r"\text{cm}", r"\%", r"\$", r"\{",
    r"\}", r"\cup", r"\pm", "!", ".", ":", r"\in", r"\infty", "&", r"\\", "i", "e", r"\sin", "|",
    r"\boxed{", "Answer:", "°", "½", "²", r"\left", r"\cdot", "and", "or",
]  # fmt: skip


def test_garbage_never_breaks_the_grader() -> None:
    rng = random.Random(1)
    for _ in range(300):
        answer, gold = ("".join(rng.choices(PIECES, k=rng.randint(1, 9))) for _ in range(2))
        with contextlib.suppress(ValueError):  # what a gold that cannot be read is answered with
            assert isinstance(grade(f"\\boxed{{{answer}}}", gold), Score | Unparseable)
