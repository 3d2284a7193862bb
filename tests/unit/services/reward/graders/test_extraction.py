import contextlib
import time

import pytest

from services.reward.graders.extraction import NoAnswer, find_answer


@pytest.mark.parametrize(
    ("response", "text", "rule"),
    [
        (r"so \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}", "box"),
        (r"\fbox{7}", "7", "box"),
        (r"$\boxed 7$", "7", "box"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", "box"),
        (r"\boxed{\boxed{5}}", "5", "box"),
        (r"First \boxed{13}. Correcting: \boxed{14}.", "14", "box"),
        (r"\boxed{12} " + "This follows from the sum above. " * 200, "12", "box"),
        (r"\boxed{840}, let me re-check. **Final Answer** \boxed{840}", "840", "box"),
        (r"the roots are \boxed{3} and \boxed{5}.", "3, 5", "box"),
        (r"$\boxed{3}$, $\boxed{4}$ or $\boxed{5}$", "3, 4, 5", "box"),
        (r"\boxed{3} or \boxed{3}", "3", "box"),
        ("steps\nAnswer: 13", "13", "label"),
        ("ANSWER: 149", "149", "label"),
        ("**Answer:** 13", "13", "label"),
        ("**Final Answer**: 13\n", "13", "label"),
        ("### Final answer:\n\n$13$", "13", "label"),
        ("Answer: `$13$`", "13", "label"),
        ("Answer: the sum is $13$ dollars.", "13", "label"),
        ("Answer: $x=1$ and $y=2$", "$x=1$ and $y=2$", "label"),
        ("Answer: 3.5. That is all.", "3.5", "label"),
        ("The answer is: 13", "13", "label"),
        (r"Answer: \boxed{34}", "34", "box"),
        (r"Work \boxed{2}, final answer: 3", "3", "label"),
        (r"Answer: 2, hence \boxed{3}", "3", "box"),
        ("so 18\n#### 18", "18", "label"),
        (r"\boxed{3}, so the final answer is 4.", "4", "label"),
        (r"The final answer is $\boxed{4}$.", "4", "box"),
        (r"\boxed{3} and the final answer is unique", "3", "box"),
        ("Answer: 34 (without quotes)", "34", "label"),
        ("<answer>13</answer>", "13", "tag"),
        (r"<answer> \boxed{13} </answer>", "13", "box"),
        ("<answer>Answer: 13</answer>", "13", "label"),
        (r"<think>maybe \boxed{5}</think> The answer is \boxed{6}", "6", "box"),
        (r"maybe \boxed{5}</think> Answer: 6", "6", "label"),
        (r"No tags, so \boxed{12}", "12", "box"),
        ("The answer is 13.", "13", "prose"),
        ("So the answer is $\\frac{1}{2}$, because of it.", r"\frac{1}{2}", "prose"),
        ("The answer is 5, because it is.", "5", "prose"),
        ("The answer is 2, 3, and 5.", "2, 3, and 5", "prose"),
        ("**Answer: 42**", "42", "label"),
        ("Answer: **42**", "42", "label"),
        ("Answer: __42__.", "42", "label"),
        ("**Final Answer: 42**\nDone.", "42", "label"),
        ("The answer is **42**.", "42", "prose"),
        ("<answer>**42**</answer>", "42", "tag"),
        ("Answer: 42<|im_end|>", "42", "label"),
        ("\\boxed{42}\n\n#### Verification\nIndeed.", "42", "box"),
        ("\\boxed{42}\n\n#### 2. Verification", "42", "box"),
        ("**Answer:** 42\n\n#### Explanation", "42", "label"),
        ("#### **42**", "42", "label"),
        (r"\boxed{13}\text{ or }\boxed{14}", "13, 14", "box"),
        (r"\boxed{3}\quad\text{and}\quad\boxed{5}", "3, 5", "box"),
        (r"\[\boxed{13}\] or \[\boxed{14}\]", "13, 14", "box"),
        (r"Either \boxed{13} or maybe \boxed{14}", "13, 14", "box"),
        (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3, 5", "box"),
        (r"\boxed{13} / \boxed{14}", "13, 14", "box"),
        (r"\boxed{13}, so in the end \boxed{14}", "14", "box"),
        ("42", "42", "bare"),
        ("$x^2$", "$x^2$", "bare"),
    ],
)
def test_the_last_statement_is_the_answer(response: str, text: str, rule: str) -> None:
    answer = find_answer(response)
    assert (answer.text, answer.rule) == (text, rule)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no box"),
        ("I do not know.", "no box"),
        ("first 13 then 14", "no box"),
        (r"\boxed{}", "an empty box"),
        (r"\boxed{ }", "an empty box"),
        (r"\boxed", "an empty box"),
        (r"\boxed{13} but really \boxed{14", "never ends"),
        (r"\boxed{1{2}", "never ends"),
        ("Answer: " + "7" * 3000, "more than 2000 characters"),
        ("Answer:", "a label without an answer"),
        ("Answer: **", "a label without an answer"),
        ("<answer></answer>", "an empty answer tag"),
        ("<answer>13", "never ends"),
        (r"<think>so \boxed{5}", "the reasoning never ends"),
        (r"<think>so \boxed{5}</think> Done.", "no box"),
    ],
)
def test_without_a_whole_statement_there_is_no_answer(response: str, reason: str) -> None:
    with pytest.raises(NoAnswer, match=reason):
        find_answer(response)


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", "{", "}", "Answer: ", "<answer>", "<think>", "</think>", "$", r"\(", " ", "#### ",
     r"\boxed{1} and ", "answer is ", "\\", "**answer", "\n"],
)  # fmt: skip
def test_hostile_text_takes_linear_time(piece: str) -> None:
    """Eight times the text takes eight times as long; with the square of it, 64 times.

    A loaded machine takes nothing from CPU time, and a slow one is slow with both.
    """

    def spent_s(num_chars: int) -> float:
        text = piece * (num_chars // len(piece))
        begin_s = time.thread_time()
        for response in (text, text + r"\boxed{1}", r"\boxed{" + text):
            with contextlib.suppress(NoAnswer):
                find_answer(response)
        return time.thread_time() - begin_s

    short_s, long_s = (min(spent_s(n) for _ in range(3)) for n in (25_000, 200_000))
    assert long_s < 24 * short_s
