"""DeepSeek-V4's chat format: what a policy is asked, in its own control tokens; no torch.

One turn of a user, and of a system if there is one; then the assistant's token and where it starts:
inside its reasoning (`thinking`), or behind a reasoning that is empty (`non_thinking`). Format:
`encoding/README.md` of the release (deepseek-ai/DeepSeek-V4-Flash). Text is never re-encoded: a
prompt becomes ids here, once, and a response stays the ids that were sampled.
"""

from dataclasses import dataclass

from shared.job_data import PromptFormat
from shared.tokenizer import CheckpointTokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`text` shows the control tokens; `token_ids` are what the policy gets."""

    text: str
    token_ids: list[int]


def encode_prompt(
    problem: str, *, prompt_format: PromptFormat, tokenizer: CheckpointTokenizer, system: str = ""
) -> EncodedPrompt:
    """A prompt as `prompt_format` wants it; ValueError for a tokenizer without the control tokens.

    Control tokens that stand in a problem's own text are text: a data set cannot end its turn.
    """
    if prompt_format == "raw":
        return EncodedPrompt(problem, tokenizer.encode(problem))
    parts = _parts(problem, system, is_thinking=prompt_format == "thinking")
    token_ids: list[int] = []
    for text, is_control in parts:
        token_ids += [_control_id(text, tokenizer)] if is_control else tokenizer.encode_plain(text)
    return EncodedPrompt("".join(text for text, _ in parts), token_ids)


def graded_text(prompt: str, response: str) -> str:
    """A response as a grader should read it: reasoning that its prompt has opened is open.

    Otherwise a box in reasoning that was cut off would look like an answer.
    """
    return THINK + response if prompt.endswith(THINK) else response


def _parts(problem: str, system: str, *, is_thinking: bool) -> list[tuple[str, bool]]:
    """Text and control tokens in turn; a turn of nothing is left out."""
    parts = [
        (BOS, True),
        (system, False),
        (USER, True),
        (problem, False),
        (ASSISTANT, True),
        (THINK if is_thinking else END_THINK, True),
    ]
    return [part for part in parts if part[0]]


def _control_id(token: str, tokenizer: CheckpointTokenizer) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise ValueError(f"the checkpoint's tokenizer has no token {token!r}: use the raw format")
    return found
