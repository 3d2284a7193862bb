"""How a row of each known data set says its problem and its answer.

A format is a list of places to look in, nothing more: the first that is there counts, whatever the
case of its key. Golds stay as written (padding, LaTeX): what they mean is a grader's business. Only
text around them goes, such as GSM8K's worked solution.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.job_data import DataFormat

_INTEGER = re.compile(r"\d{1,3}")


def detect_format(fields: Mapping[str, Any]) -> DataFormat:
    """Name the format by the keys of a data set's first row."""
    row = _lower_keys(fields)
    if "reward_model" in row or isinstance(row.get("prompt"), list):
        return "dapo"
    if "ground_truth" in row or "final_answer" in row:
        return "deepmath"
    if "question" in row and "####" in str(row.get("answer")):
        return "gsm8k"
    if "problem" in row and row.keys() & {"unique_id", "subject", "level"}:
        return "math500"
    if any(key in row for key in FORMATS["prompt"].problem_keys):
        return "prompt"
    raise ValueError(f"no known format has the keys {sorted(fields)}; known: {', '.join(FORMATS)}")


def read_fields(fields: Mapping[str, Any], row_format: DataFormat) -> tuple[str, str]:
    """Problem text and gold of one row; ValueError says what is missing."""
    row = _lower_keys(fields)
    places = FORMATS[row_format]
    problem = _text(_first(row, places.problem_keys))
    if not problem:
        raise ValueError(f"a row without a problem: {row_format} looks for {places.problem_keys}")
    gold = _text(_first(row, places.gold_keys)).strip()
    if not gold:
        raise ValueError(f"a row without an answer: {row_format} looks for {places.gold_keys}")
    for text in (problem, gold):
        _check_unicode(text)
    return problem, places.read_gold(gold)


def _check_unicode(text: str) -> None:
    """JSON may spell half a character (`"\\ud800"`), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        half = text[err.start].encode("unicode_escape").decode()
        raise ValueError(f"{half} at character {err.start} is half a character") from err


def _lower_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in fields.items()}


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value that is there; `a.b` looks into a nested object."""
    for key in keys:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != "":
            return value
    return None


def _text(value: Any) -> str:
    """Plain text of a value: chat messages joined by a blank line, a list of one unwrapped."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text(value.get("content", value.get("text")))
    if isinstance(value, list):
        return "\n\n".join(text for text in map(_text, value) if text)
    return str(value)


def _gsm8k_gold(answer: str) -> str:
    _, marker, gold = answer.rpartition("####")
    if not marker or not gold.strip():
        raise ValueError("a row without an answer: gsm8k puts it behind '####'")
    return gold.strip().replace(",", "")


def _aime_gold(answer: str) -> str:
    """The three digits; some copies box them or add a degree sign."""
    bare = answer.strip("$ .").removeprefix(r"\boxed{").removesuffix("}")
    bare = bare.removesuffix(r"^\circ").strip("$ ")
    if not _INTEGER.fullmatch(bare):
        raise ValueError(f"answer {answer[:80]!r} is no integer from 0 to 999, which aime needs")
    return bare


@dataclass(frozen=True, slots=True)
class _Format:
    problem_keys: tuple[str, ...]
    gold_keys: tuple[str, ...]
    read_gold: Callable[[str], str] = str


_PROBLEM = ("problem", "prompt", "question")

FORMATS: dict[DataFormat, _Format] = {
    "prompt": _Format(_PROBLEM, ("answer", "gold", "label")),
    # Two public forms: a chat with the answer under reward_model or label, and plain text.
    "dapo": _Format(
        ("prompt", "problem"), ("label", "reward_model.ground_truth", "answer", "solution")
    ),
    "gsm8k": _Format(("question",), ("answer",), _gsm8k_gold),
    "math500": _Format(("problem",), ("answer",)),
    "aime": _Format(_PROBLEM, ("answer", "label", "ground_truth", "solution"), _aime_gold),
    "deepmath": _Format(("prompt", "question", "problem"), ("ground_truth", "final_answer")),
}
