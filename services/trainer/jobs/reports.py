"""report.html of a run: written when its job ends, and again when it is asked for and has aged.

In a child: plotting must neither block nor end this process. Those that are asked for are made one
at a time, as each takes a core; the one of a job that ends does not wait for them.
"""

import asyncio
import sys
import time
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from services.trainer.config import PROJECT_ROOT
from services.trainer.events import EVENTS_FILE

log = structlog.get_logger()
REPORT_FILE = "report.html"
AGE_S = 30.0  # of the report of a job in progress, before another is made


class Reports:
    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._asked = asyncio.Lock()
        self._runs: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def refresh(self, run_dir: Path, *, is_running: bool) -> None:
        """Make a report anew that lacks events; that of a running job once in AGE_S."""
        async with self._asked, self._alone(run_dir):
            if await asyncio.to_thread(_has_aged, run_dir, AGE_S if is_running else 0.0):
                await self._make(run_dir)

    async def write(self, run_dir: Path) -> None:
        async with self._alone(run_dir):
            await self._make(run_dir)

    def _alone(self, run_dir: Path) -> asyncio.Lock:
        """Two reports of one run would write the same files."""
        return self._runs.setdefault(run_dir, asyncio.Lock())

    async def _make(self, run_dir: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.trainer.report", str(run_dir)),
            cwd=PROJECT_ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, complaint = await asyncio.wait_for(process.communicate(), self._deadline_s)
        except TimeoutError:
            log.warning("report_late", run_dir=str(run_dir), after_s=self._deadline_s)
        else:
            if process.returncode:
                tail = complaint.decode(errors="replace")[-2000:]
                log.error("report_failed", run=run_dir.name, code=process.returncode, error=tail)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _has_aged(run_dir: Path, age_s: float) -> bool:
    """Whether events came after the report was made, and that was more than `age_s` ago."""
    events, report = run_dir / EVENTS_FILE, run_dir / REPORT_FILE
    if not events.exists():
        return False
    if not report.exists():
        return True
    made_s = report.stat().st_mtime
    return events.stat().st_mtime > made_s and time.time() - made_s > age_s
