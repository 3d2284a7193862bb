"""How a command ends: its own code, a signal's code after a clean end, or one sentence."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.cli.run import log_to, run
from services.client import JobRefused
from shared.errors import ConfigInvalid, HttpFailed, StackFailed, TandemError


@pytest.mark.parametrize("code", [0, 1])
def test_a_commands_code_is_the_exit_code(code: int) -> None:
    async def command() -> int:
        return code

    with pytest.raises(SystemExit) as ended:
        run(command())
    assert ended.value.code == code


@pytest.mark.parametrize(
    ("number", "code", "drains", "told"),
    [
        (signal.SIGINT, 130, True, "SIGINT: stopping, this drains what is running"),
        (signal.SIGTERM, 143, False, "SIGTERM: stopped"),
    ],
)
def test_a_signal_drains_once_and_tells_its_number(
    number: signal.Signals, code: int, drains: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drained: list[bool] = []

    async def command() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), number)  # an impatient second one
            await asyncio.sleep(0.05)
            drained.append(True)
        return 0

    with pytest.raises(SystemExit) as ended:
        run(command(), drains=drains)
    assert ended.value.code == code
    assert drained == [True]
    assert capsys.readouterr().err == f"\n{told}\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StackFailed("rollout-0 keeps dying"), "rollout-0 keeps dying\n"),
        (JobRefused(["a = 1: wrong", "b: is required"]), "The job is refused:\n  a = 1: wrong\n"),
        (HttpFailed("GET", "http://x/v1/jobs", None, "refused"), "No trainer answers GET http://x"),
        (HttpFailed("GET", "http://x/v1/jobs", 500, "broken"), "500: broken"),
    ],
)
def test_an_error_is_told_without_a_traceback(
    error: TandemError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(command())
    assert ended.value.code == 1
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid, match=r"Cannot write to .*file/x: Not a directory"):
        log_to(tmp_path / "file" / "x" / "stack.log")
