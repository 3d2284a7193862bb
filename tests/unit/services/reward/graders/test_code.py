"""Programs: what passes, what fails, and what a locked-down child must not be able to do."""

import json
import platform
import re
import tempfile
import time
from pathlib import Path

import pytest

from services.reward.graders import sandbox
from services.reward.graders.code import NO_SPACE, grade
from shared.messages import Score, Unparseable

SUMS = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6"]})
ADD = json.dumps({"function": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]})


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no question of time has far more of it than it takes."""
    monkeypatch.setattr("services.reward.graders.limit._current_s", 60.0)


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
        ("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "PermissionError"),
        ("import os; os.sched_setaffinity(os.getppid(), [0])", "PermissionError"),
        ("import os; os.setpgid(0, 0)", "PermissionError"),
        ("import os; os.setsid()", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, 1)", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, 10, 9)", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, fcntl.F_SETFL, 0o20000)", "PermissionError"),
        ("import fcntl; fcntl.ioctl(0, 0x5452, 1)", "PermissionError"),
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


CALLS = {  # tried by number, with arguments that would do no harm
    "x86_64": {"rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "shmget": 29, "semget": 64,
               "msgget": 68, "mq_open": 240, "sched_setscheduler": 144, "ioprio_set": 251},
    "aarch64": {"rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "shmget": 194, "semget": 190,
                "msgget": 186, "mq_open": 180, "sched_setscheduler": 119, "ioprio_set": 30},
}[platform.machine()]  # fmt: skip


@pytest.mark.parametrize("number", CALLS.values(), ids=CALLS.keys())
def test_a_denied_call_reaches_no_kernel(number: int) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"failed = libc.syscall({number}, -1, -1, -1, -1)\nprint(failed, ctypes.get_errno())"
    )
    gold = json.dumps({"inputs": [""], "outputs": ["-1 1"]})  # EPERM
    assert graded(code, gold).value == 1.0


def test_a_program_cannot_choose_to_outlive_its_parent_but_may_lock_files() -> None:
    gold = json.dumps({"inputs": [""], "outputs": ["-1 1\n0"]})
    code = (
        "import ctypes, fcntl\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.prctl(1, 0, 0, 0, 0), ctypes.get_errno())\n"
        "file = open('a', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(fcntl.fcntl(file, fcntl.F_SETFD, 0))"
    )
    assert graded(code, gold).value == 1.0


def test_a_program_may_use_its_own_folder_and_threads() -> None:
    code = (
        "import threading\n"
        "a, b = map(int, input().split())\n"
        "def write():\n    open('sum', 'w').write(str(a + b))\n"
        "t = threading.Thread(target=write); t.start(); t.join()\n"
        "print(open('sum').read())"
    )
    assert graded(code).value == 1.0


FILL = (
    "for number in range({files}):\n"
    "    with open(f'f{{number}}', 'wb') as file:\n        file.write(bytes({size}))\n"
    "import time\ntime.sleep({sleep_s})\nprint(5)"
)


@pytest.mark.parametrize(
    ("files", "size", "expected"), [(40, 2**20, 1.0), (200, 2**20, 0.0), (6000, 1, 0.0)]
)
def test_all_files_of_a_program_together_are_bounded(
    files: int, size: int, expected: float
) -> None:
    """Forty megabytes are allowed, two hundred are not, nor are thousands of files."""
    gold = json.dumps({"inputs": [""], "outputs": ["5"]})
    outcome = graded(FILL.format(files=files, size=size, sleep_s=0.2), gold)
    assert outcome.value == expected, outcome.reason
    if not expected:
        assert "its files exceed 64 MiB, 4096 in number" in outcome.reason


def test_the_disk_is_watched_where_no_file_system_can_be_mounted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lock without its mount: the program is killed from outside, while it runs."""
    text = Path(sandbox.__file__).read_text()
    assert "    _bound_disk(libc, request)\n" in text
    unmounted = tmp_path / "sandbox.py"
    unmounted.write_text(text.replace("    _bound_disk(libc, request)\n", ""))
    monkeypatch.setattr(sandbox, "__file__", str(unmounted))
    gold = json.dumps({"inputs": [""], "outputs": ["5"]})
    outcome = graded(FILL.format(files=200, size=2**20, sleep_s=100), gold)
    assert (outcome.value, outcome.reason) == (0.0, f"test 1: {NO_SPACE}")
    nameless = "files = []\nimport os, time\nfor n in range(10):\n"
    nameless += "    files.append(open('a', 'wb'))\n    os.remove('a')\n"
    nameless += "    files[-1].write(bytes(2**23)); files[-1].flush()\ntime.sleep(100)"
    assert NO_SPACE in graded(nameless, gold).reason
    before = set(Path(tempfile.gettempdir()).glob("tandem-code-*"))
    nested = (
        "import os\nfor _ in range(1500):\n    os.mkdir('abcd')\n    os.chdir('abcd')\nprint(5)"
    )
    assert NO_SPACE in graded(nested, gold).reason
    assert set(Path(tempfile.gettempdir()).glob("tandem-code-*")) == before


def test_a_program_that_runs_on_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.graders.limit._current_s", 1.5)
    (seconds,) = re.findall(r"took longer than (.+) s", graded("while True: pass").reason)
    assert 0 < float(seconds) <= 1.2  # its share of the limit, less what the start has taken


def test_all_tests_together_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.graders.limit._current_s", 2.0)
    gold = json.dumps({"inputs": [""] * 50, "outputs": ["5"] * 50})
    begin_s = time.monotonic()
    outcome = graded("import time; time.sleep(0.3); print(5)", gold)
    assert outcome.value == 0.0
    assert time.monotonic() - begin_s < 15  # what the programs alone would take


PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    "response",
    [
        f"```text\nsample\n```\nSolution:\n```python\n{PROGRAM}\n```",
        f"```cpp\nint x;\n```\n\n```\n{PROGRAM}\n```\n```text\n5\n```",
        f"~~~Python\n{PROGRAM}\n~~~",
        f"```python\n{PROGRAM}\n```\nand then\n```python\nprint(",
        f"1. So:\n   ```python3\n   {PROGRAM.replace(chr(10), chr(10) + '   ')}\n   ```",
    ],
)
def test_the_last_closed_block_of_python_counts(response: str) -> None:
    assert grade(response, SUMS).value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "response",
    [
        f"<think>\n```python\n{PROGRAM}\n```",
        f"```python\n{PROGRAM}",
        f"```cpp\n{PROGRAM}\n```",
        f"```text\n```python\n{PROGRAM}",
    ],
)
def test_a_draft_or_another_language_is_no_program(response: str) -> None:
    assert isinstance(grade(response, SUMS), Unparseable)


def test_a_response_without_a_program_is_unparseable() -> None:
    assert isinstance(grade("print(5)", SUMS), Unparseable)


@pytest.mark.parametrize(
    "gold", ["", "5", "{}", '{"inputs": [], "outputs": []}', '{"inputs": [1]}']
)
def test_a_gold_without_tests_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        grade(fenced("print(5)"), gold)
