"""Programming answers: the last fenced block is run on every test, locked down (`sandbox.py`).

Fences are paired line by line; blocks of Python and those that name no language count. All tests
together have `SHARE` of the check's own limit, so that what is too slow is wrong, not timed out.
The gold is JSON: {"inputs": ["2 3\\n"], "outputs": ["5\\n"]} for programs that read and print, with
"function": "add" and argument lists as inputs for functions. All tests must pass for a 1; a program
that fails, prints something else or takes too long earns 0. Expected outputs never enter its
process.
"""

import contextlib
import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from services.reward.graders import limit, sandbox
from services.reward.graders.extraction import NoAnswer, final_part
from shared.messages import Score, Unparseable

SHARE = 0.8  # of the check's limit
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 16 * 2**20
DISK_BYTES = 64 * 2**20  # of all its files together
MAX_FILES = 4096
MAX_DEPTH = 64  # of folders within each other
REMOVE_S = 30.0
WATCH_S = 0.05
MAX_TESTS = 100
TOLERANCE = 1e-6  # of numbers that a function returns or a program prints

NO_SPACE = (
    f"its files exceed {DISK_BYTES // 2**20} MiB, {MAX_FILES} in number or {MAX_DEPTH} levels"
)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*")
_LANGUAGES = {"", "python", "python3", "py"}


@dataclass(frozen=True, slots=True)
class _Tests:
    inputs: list[Any]
    outputs: list[Any]
    function: str | None


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a program ended: what it printed or returned, or why it has failed."""

    printed: str = ""
    value: Any = None
    failure: str = ""


def grade(response: str, gold: str) -> Score | Unparseable:
    """1 if every test passes. ValueError: the gold has no tests; OSError: no lock-down here."""
    tests = _read_gold(gold)
    try:
        blocks = _blocks(final_part(response))
    except NoAnswer as err:
        return Unparseable(reason=str(err))
    if not blocks:
        return Unparseable(reason="no fenced block of Python")
    code = blocks[-1]
    deadline_s = time.monotonic() + SHARE * limit.current_s()
    for number, (given, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True), 1):
        ended = _run(code, given, tests.function, deadline_s - time.monotonic())
        if ended.failure or not _passes(ended, expected, tests.function):
            why = ended.failure or "another result"
            return Score(value=0.0, extracted=code[:200], reason=f"test {number}: {why}")
    return Score(value=1.0, extracted=code[:200], reason=f"{len(tests.inputs)} tests passed")


def _blocks(text: str) -> list[str]:
    """The closed blocks of Python; one that a limit of tokens has cut off is none."""
    blocks: list[str] = []
    mark, language, lines = "", "", list[str]()
    for line in text.splitlines():
        fence = _FENCE.fullmatch(line)
        if not mark and fence:
            mark, language, lines = fence[1], fence[2].lower(), []
        elif mark and fence and not fence[2] and fence[1].startswith(mark):
            if language in _LANGUAGES:
                blocks.append(textwrap.dedent("\n".join(lines)))
            mark = ""
        else:
            lines.append(line)
    return blocks


def _read_gold(gold: str) -> _Tests:
    try:
        found = json.loads(gold)
        tests = _Tests(
            found["inputs"], found["outputs"], found.get("function") or found.get("fn_name")
        )
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"the gold holds no tests: {err!r}") from err
    if not 0 < len(tests.inputs) == len(tests.outputs) <= MAX_TESTS:
        sizes = f"{len(tests.inputs)} inputs, {len(tests.outputs)} outputs"
        raise ValueError(f"the gold has {sizes}; 1 to {MAX_TESTS} of each are needed")
    return tests


def _run(code: str, given: Any, function: str | None, left_s: float) -> _Ended:
    if left_s <= 0:
        return _Ended(failure="no time was left")
    with _scratch() as folder:
        request = {
            "code": code,
            "folder": folder,
            "stdin": given if function is None else "",
            "function": function,
            "arguments": given if function is not None else [],
            "cpu_s": math.ceil(left_s),
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": FILE_BYTES,
            "disk_bytes": DISK_BYTES,
            "max_files": MAX_FILES,
        }
        return _in_child(request, Path(folder), left_s)


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A folder, and whatever is in it at the end, however deep: Python's own removal recurses."""
    folder = tempfile.mkdtemp(prefix="tandem-code-")
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", "--", folder], check=False, timeout=REMOVE_S)


def _in_child(request: dict[str, Any], folder: Path, left_s: float) -> _Ended:
    names = ("out", "errors", "result")
    with contextlib.ExitStack() as stack:
        out, errors, result = (stack.enter_context((folder / n).open("w+b")) for n in names)
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(json.dumps(request | {"result": result.fileno()}).encode())
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", sandbox.__file__],
            stdin=given,
            stdout=out,
            stderr=errors,
            env=_ENVIRONMENT,
            pass_fds=[result.fileno()],
        )
        if excess := _watch(child, folder, left_s):
            return _Ended(failure=excess)
        if child.returncode == sandbox.LOCK_FAILED:
            raise OSError(_text(errors).strip())
        if child.returncode != 0:
            return _Ended(failure=_failure(child.returncode, _text(errors)))
        return _read(_text(out), _text(result), request["function"])


def _watch(child: "subprocess.Popen[bytes]", folder: Path, left_s: float) -> str:
    """Wait for its end, or make it end; why it had to."""
    ends_s = time.monotonic() + left_s
    try:
        while True:
            try:
                child.wait(min(WATCH_S, max(ends_s - time.monotonic(), 0.001)))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= ends_s:
                    return f"took longer than {left_s:.1f} s"
                if used_too_much(folder, child.pid):
                    return NO_SPACE
            else:
                return NO_SPACE if used_too_much(folder, child.pid) else ""
    finally:
        child.kill()
        child.wait()


def used_too_much(folder: Path, pid: int) -> bool:
    """Whether a program has more on disk than it may, files that have lost their name included.

    Where its folder is a file system of its own, all that is seen here is what it printed.
    """
    num_files = num_bytes = 0
    for status in _files(folder, pid):
        if status is None:
            return True
        num_files, num_bytes = num_files + 1, num_bytes + 512 * status.st_blocks
        if num_files > MAX_FILES or num_bytes > DISK_BYTES:
            return True
    return False


def _files(folder: Path, pid: int) -> Iterator[os.stat_result | None]:
    """Everything below the folder; None for what lies too deep."""
    waiting = [(str(folder), 0)]
    while waiting:
        path, depth = waiting.pop()
        if depth > MAX_DEPTH:
            yield None
            return
        with contextlib.suppress(OSError), os.scandir(path) as entries:  # it has gone meanwhile
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
    with contextlib.suppress(OSError):  # the program has ended
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    yield status


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(FILE_BYTES).decode(errors="replace")


def _failure(code: int, errors: str) -> str:
    last = errors.strip().splitlines()[-1:]
    if code > 0 and last and "[Errno 28]" in last[0]:
        return f"{last[0][:200]}: {NO_SPACE}"
    return f"killed by signal {-code}" if code < 0 else (last or [f"exit code {code}"])[0][:200]


def _read(printed: str, result: str, function: str | None) -> _Ended:
    if function is None:
        return _Ended(printed=printed)
    try:
        return _Ended(printed=printed, value=json.loads(result))
    except (ValueError, RecursionError):
        return _Ended(failure="returned no JSON value")


def _passes(ended: _Ended, expected: Any, function: str | None) -> bool:
    if function is not None:
        return _same_value(ended.value, expected)
    return _same_text(ended.printed, str(expected))


def _same_text(printed: str, expected: str) -> bool:
    """Line by line without space at the ends; else word by word, numbers within `TOLERANCE`."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected)]
    if lines[0] == lines[1]:
        return True
    left, right = printed.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    if "." not in left or "." not in right:  # whole numbers are compared as they are written
        return False
    try:
        return math.isclose(float(left), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) or isinstance(right, float):
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return numbers and math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same_value, left, right))
    return type(left) is type(right) and bool(left == right)
