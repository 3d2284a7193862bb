"""Programs: what passes, what fails, and what a locked-down child must not be able to do."""

import json
from pathlib import Path

import pytest

from services.reward.graders.code import grade
from shared.messages import Score, Unparseable

SUMS = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6"]})
ADD = json.dumps({"function": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]})


def fenced(code: str) -> str:
    return f"<think>```python\nprint(0)\n```</think>So:\n```python\n{code}\n```\n"


def graded(code: str, gold: str = SUMS) -> Score:
    outcome = grade(fenced(code), gold)
    assert isinstance(outcome, Score)
    return outcome


def test_a_program_that_passes_every_test_is_right() -> None:
    assert graded("a, b = map(int, input().split())\nprint(a + b)").value == 1.0
    assert graded("def add(a, b):\n    return a + b", ADD).value == 1.0
    assert (
        graded("class Solution:\n    def add(self, a, b):\n        return a + b", ADD).value == 1.0
    )


@pytest.mark.parametrize(
    ("code", "gold", "reason"),
    [
        ("print(5)", SUMS, "test 2: another result"),
        ("print('5.0')", SUMS, "test 1: another result"),
        ("1 / 0", SUMS, "ZeroDivisionError"),
        ("def (", SUMS, "SyntaxError"),
        ("import sys; sys.exit(3)", SUMS, "exit code 3"),
        ("def add(a, b):\n    return 3", ADD, "test 2: another result"),
        ("def add(a, b):\n    return True", ADD, "test 1: another result"),
        ("def sub(a, b):\n    return 3", ADD, "Solution"),
        ("def add(a, b):\n    return {1}", ADD, "not JSON serializable"),
    ],
)
def test_a_program_that_fails_earns_nothing_and_says_why(code: str, gold: str, reason: str) -> None:
    outcome = graded(code, gold)
    assert outcome.value == 0.0
    assert reason in outcome.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("open('/etc/passwd').read()", "Permission denied"),
        ("import os; os.listdir('/proc')", "Permission denied"),
        ("open('/tmp/tandem-escaped', 'w')", "Permission denied"),
        ("bytearray(10**10)", "MemoryError"),
        ("import ctypes; ctypes.CDLL(None).abort()", "another result"),
    ],
)  # fmt: skip
def test_a_locked_down_program_reaches_nothing_outside(code: str, reason: str) -> None:
    outcome = graded(code)
    assert outcome.value == 0.0
    if reason != "another result":
        assert reason in outcome.reason
    assert not Path("/tmp/tandem-escaped").exists()


def test_a_program_may_use_its_own_folder_and_threads() -> None:
    code = (
        "import threading\n"
        "a, b = map(int, input().split())\n"
        "def write():\n    open('sum', 'w').write(str(a + b))\n"
        "t = threading.Thread(target=write); t.start(); t.join()\n"
        "print(open('sum').read())"
    )
    assert graded(code).value == 1.0


def test_a_program_that_runs_on_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.graders.code.WALL_S", 1.0)
    assert "took longer than 1 s" in graded("while True: pass").reason


def test_a_response_without_a_program_is_unparseable() -> None:
    assert isinstance(grade("print(5)", SUMS), Unparseable)


@pytest.mark.parametrize(
    "gold", ["", "5", "{}", '{"inputs": [], "outputs": []}', '{"inputs": [1]}']
)
def test_a_gold_without_tests_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        grade(fenced("print(5)"), gold)
