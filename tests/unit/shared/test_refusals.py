"""Error answers in words, whoever made them."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, ValidationError

from shared.errors import HttpFailed
from shared.refusals import fault, sentences


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("no job is active", ["no job is active"]),
        ([{"key": "steps", "value": 0, "message": "too few"}], ["steps = 0: too few"]),
        (
            [{"key": "a", "message": "unknown", "allowed": ["b", "c"]}],
            ["a: unknown (allowed: b, c)"],
        ),
        ([{"loc": ["body", "x", 0], "msg": "no number"}], ["x.0: no number"]),
        ([{"loc": 3, "msg": "no number"}], ["no number"]),
        (["one", "two"], ["one", "two"]),
    ],
)
def test_each_entry_is_a_sentence(detail: object, said: list[str]) -> None:
    assert sentences(json.dumps({"detail": detail})) == said


@pytest.mark.parametrize("body", ["<html>bad gateway</html>", "[]", '"text"', ""])
def test_a_body_that_is_no_refusal_is_told_as_it_is(body: str) -> None:
    assert sentences(body) == [body]


def test_a_failed_request_repeats_no_json() -> None:
    err = HttpFailed("POST", "http://x/v1/attribution", 409, '{"detail":"no job is active"}')
    assert str(err) == "POST http://x/v1/attribution: 409: no job is active"


class Length(BaseModel):
    tokens: int = Field(gt=0)


def test_a_fault_is_told_without_numbers_and_class_names(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as missing:
        (tmp_path / "none").read_text()
    assert fault(missing.value) == f"{tmp_path / 'none'}: No such file or directory"
    with pytest.raises(ValidationError) as wrong:
        Length(tokens=0)
    assert fault(wrong.value) == "tokens: Input should be greater than 0"
    assert fault(ValueError("no list")) == "no list"
