"""The demo's task and its committed problems."""

import json
from pathlib import Path

import pytest

from scripts.arithmetic import (
    MAX_RESPONSE_TOKENS,
    OPERANDS,
    Addition,
    last_field,
    split,
)

ASSETS = Path("assets/arithmetic")


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


def operands(problem: str) -> frozenset[int]:
    left, right = problem.removesuffix("=").split("+")
    return frozenset((int(left), int(right)))


def test_worked_answer_shows_each_step() -> None:
    assert Addition(37, 48).prompt == "37+48="
    assert Addition(37, 48).worked == "7+8=15;3+4+1=08;85"
    assert Addition(10, 90).worked == "0+0=00;1+9+0=10;100"


def test_every_worked_answer_is_right_and_fits() -> None:
    for left in OPERANDS:
        for right in OPERANDS:
            addition = Addition(left, right)
            *steps, answer = addition.worked.split(";")
            assert answer == addition.answer == str(left + right)
            for step in steps:
                terms, _, total = step.partition("=")
                assert sum(map(int, terms.split("+"))) == int(total)
            assert len(addition.worked) + 1 <= MAX_RESPONSE_TOKENS


def test_last_field_is_the_answer_whatever_stands_before() -> None:
    assert last_field("7+8=15;3+4+1=08;85") == "85"
    assert last_field("85") == "85"
    assert last_field("1;2;") == ""


def test_heldout_sums_never_occur_in_training() -> None:
    train, heldout = split(3, num_train=7000, num_heldout=128)
    seen = {frozenset((one.left, one.right)) for one in train}
    assert not seen & {frozenset((one.left, one.right)) for one in heldout}
    assert len({one.prompt for one in train}) == 7000


def test_split_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="num_train 9000 exceeds"):
        split(0, num_train=9000, num_heldout=100)


def test_committed_problems_are_right_and_disjoint() -> None:
    train, heldout = rows_of("train.jsonl"), rows_of("heldout.jsonl")
    assert len(heldout) >= 96
    for row in (*train, *heldout):
        left, right = row["problem"].removesuffix("=").split("+")
        assert row["answer"] == str(int(left) + int(right))
        assert 0 <= int(row["answer"]) <= 999
    assert not {operands(r["problem"]) for r in train} & {operands(r["problem"]) for r in heldout}
