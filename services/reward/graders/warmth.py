r"""What a grading process computes before it is asked: one example of each kind of expression.

math-verify's parser learns as it goes: the first tuple, matrix or root of a process takes 50 to
170 ms to parse, later ones a fraction. A process that has seen these passes that on by forking.
"""


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


WARM_UP: list[tuple[str, str]] = [
    (_boxed(answer), gold)
    for answer, gold in [
        ("x+1", "x-1"),
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{2}}{3}"),
        (r"2\sqrt[3]{5}", r"-3\sqrt{13}"),
        (r"\frac{a+b}{2c}", r"\frac{11+9a}{20}"),
        ("x^2+3x-6", "x^5-x^4+x^3-1"),
        (r"2^{n+1}-1", r"3\cdot 2^{n}"),
        (r"\frac{8\pi}{9}", r"18+2\pi"),
        (r"-\ln v", r"\log_2 8"),
        (r"\cot x", r"\sin(2x)+\cos^2 x"),
        (r"\tan^{-1} x", r"\arctan\frac{1}{2}"),
        (r"e^{i\pi}", r"3e^3"),
        ("1+274i", "6-5i"),
        (r"\binom{6}{2}", "5!"),
        (r"\frac{1}{2006!}", r"1999^{1999}"),
        (r"6.02\times 10^{23}", r"5\div 3"),
        ("|x-2|", r"\lfloor x\rfloor"),
        ("xy", "yx+z"),
        ("(a+5)(b+2)", "(x+1)^2"),
        ("3(x-1)", "2(a+b)c"),
        ("x=y+1", "5x-7y+11z+4=0"),
        (r"x\le 3", "x<5"),
        (r"-2<x<7", r"x\ge 3"),
        (r"k\ne 1", r"k\ne 2"),
        (r"x\in [-2,7]", "[0,2]"),
        (r"(1,2)\cup(3,4)", r"(-\infty,2)\cup[3,\infty)"),
        (r"\mathbb{R}", "(0,1]"),
        (r"\infty", "0.5x"),
        ("f(x)", "g(x)+1"),
        (r"\int_0^1 x^2 dx", "x"),
        (r"\sum_{k=1}^{3} k^2", "n"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", "y"),
        (r"\alpha+\beta", r"\theta_1"),
        (r"\sqrt{1+\sqrt{2}}", r"\sqrt{\frac{3}{4}}"),
        (r"\overline{AB}", "AB"),
        (r"O(n^2)", r"n\log n"),
        # Of one value in two forms: these are compared to the last digit.
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{\pi}{3}", r"\frac{2\pi}{6}"),
        (r"6+2\pi", r"2(3+\pi)"),
        ("x^2-2x+1", "(x-1)^2"),
        (r"2^{n+2}", r"4\cdot 2^n"),
        ("3x-2y", "x+2(x-y)"),
        ("2(1+3i)", "2+6i"),
    ]
]
