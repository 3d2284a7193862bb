"""Running a command's coroutine: signals become a clean end, errors become one sentence.

Exit codes: what the coroutine returns; 1 for an error; 128 + n after signal n (130: Ctrl-C).
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TextIO

import structlog

from services.client import JobRefused
from shared.errors import ConfigInvalid, HttpFailed, TandemError
from shared.telemetry import configure_logging

HOW_TO_START = "start one with `tandem up`, or name another with --trainer."


def run(command: Coroutine[Any, Any, int], *, drains: bool = False) -> NoReturn:
    """Run to the end and exit with its code; the first SIGINT or SIGTERM drains it.

    `drains` is for commands that started services: stopping those takes a while, and is told.
    """
    configure_logging("cli", level="ERROR")
    try:
        code = asyncio.run(_until_signal(command, drains=drains))
    except JobRefused as err:
        code = _fail("The job is refused:", *err.problems)
    except HttpFailed as err:
        code = _fail(_no_answer(err) if err.status is None else str(err))
    except TandemError as err:
        code = _fail(str(err))
    raise SystemExit(code)


def log_to(path: Path) -> TextIO:
    """Send this process's own log to a file: the terminal belongs to the progress."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as err:
        raise ConfigInvalid(f"Cannot write to {path.parent}: {err.strerror}.") from err
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("INFO"),
        logger_factory=structlog.WriteLoggerFactory(file),
    )
    return file


async def _until_signal(command: Coroutine[Any, Any, int], *, drains: bool) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(command)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not received:  # once: a second Ctrl-C must not cut the draining short
            what = "stopping, this drains what is running" if drains else "stopped"
            sys.stderr.write(f"\n{number.name}: {what}\n")
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def _no_answer(err: HttpFailed) -> str:
    return f"No trainer answers {err.method} {err.url}: {HOW_TO_START}"


def _fail(*lines: str) -> int:
    sys.stderr.write("\n  ".join(lines) + "\n")
    return 1
