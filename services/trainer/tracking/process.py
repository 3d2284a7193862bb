"""The trainer's side: the tracking process lives as long as the job does here."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import structlog

from services.trainer.config import PROJECT_ROOT
from shared.job_cluster import TrackingSection
from shared.process import die_with_parent, kill_marked, prepare_to_fork

log = structlog.get_logger()
LOG_FILE = "tracking.log"
GOODBYE_S = 8.0  # W&B writes its file, or sends the rest; within a service's own goodbye
_MARK = "TANDEM_TRACKING"


@contextlib.asynccontextmanager
async def tracking(settings: TrackingSection, run_dir: Path) -> AsyncIterator[None]:
    """Within the block the run's numbers are told; leaving waits until all of them are.

    Whatever it started is ended, too. Its failure is a warning: the run folder has the numbers.
    """
    if not settings.is_on:
        yield
        return
    try:
        process = await _start(run_dir)
    except OSError as err:
        log.warning("tracking_not_started", error=str(err), hint=_hint(run_dir))
        yield
        return
    try:
        yield
    finally:
        await _end(process, run_dir)


def _hint(run_dir: Path) -> str:
    return f"python -m services.trainer.tracking {run_dir} writes the rest"


async def _start(run_dir: Path) -> asyncio.subprocess.Process:
    prepare_to_fork()
    with (run_dir / LOG_FILE).open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.trainer.tracking", str(run_dir), "--follow"),
            cwd=PROJECT_ROOT,
            env={**os.environ, _MARK: str(run_dir)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


async def _end(process: asyncio.subprocess.Process, run_dir: Path) -> None:
    hint = _hint(run_dir)
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), GOODBYE_S)
    except TimeoutError:
        log.warning("tracking_late", after_s=GOODBYE_S, hint=hint)
    finally:
        kill_marked(_MARK, str(run_dir))
    if await process.wait():
        log.warning("tracking_failed", code=process.returncode, log=LOG_FILE, hint=hint)
