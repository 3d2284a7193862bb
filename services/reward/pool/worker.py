"""One grading process, seen from the service."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.reward.pool.requests import Task
from services.reward.pool.wire import Decoder, Progress, ProgressPage, encode

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Running:
    """What a worker is doing at this moment."""

    task: Task | None  # None: one that was handed to another worker
    wall_s: float
    cpu_s: float  # in steps of 10 ms
    wants_cpu: bool  # it would compute if it were given a core, or does


class Worker(asyncio.Protocol):
    """What it was told, what it reports, and what it uses meanwhile."""

    def __init__(
        self,
        page: ProgressPage,
        on_report: Callable[["Worker", list[Any]], None],
        on_death: Callable[["Worker"], None],
    ) -> None:
        self.pid = 0
        self.is_slow = False
        self.is_stale = False  # to be ended once it is idle
        self.batch: list[Task | None] = []  # None: handed to another worker
        self.number = 0  # of the batch
        self.num_checks = 0
        self.watch: asyncio.TimerHandle | None = None
        self._sent_s = 0.0
        self._page = page
        self._last_progress = page.read()
        self._on_report = on_report
        self._on_death = on_death
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for number, is_spent, results in self._decoder.feed(data):
            if self._is_open and number == self.number:
                self._on_report(self, [is_spent, results])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self.close()
            self._on_death(self)

    def send(self, tasks: list[Task]) -> None:
        assert self._transport is not None
        self.number += 1
        self.batch = list(tasks)
        self.num_checks += len(tasks)
        self._sent_s = time.monotonic()
        checks = [(c.grader, c.response, c.gold, c.timeout_s) for c in (t.check for t in tasks)]
        self._transport.write(encode([self.number, checks]))

    def open_tasks(self) -> list[Task]:
        return [task for task in self.batch if task is not None and not task.is_settled]

    def running(self) -> "Running":
        """The check it is in; a batch that it has not begun counts as its first check."""
        progress, now_s = self._progress(), time.monotonic()
        fields = _proc(self.pid, "stat").rpartition(")")[2].split() or ["?"] * 13
        wants_cpu = fields[0] == "R"
        if progress.batch != self.number:
            return Running(self.batch[0], now_s - self._sent_s, 0.0, wants_cpu)
        used_s = 0.0
        if fields[0] != "?":
            used_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S - progress.cpu_s
        return Running(
            self.batch[progress.index], now_s - progress.started_s, max(used_s, 0.0), wants_cpu
        )

    def memory_bytes(self) -> int:
        fields = _proc(self.pid, "statm").split()
        return int(fields[1]) * _PAGE_BYTES if fields else 0

    def lower_priority(self, nice: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have died a moment ago
            nice += os.getpriority(os.PRIO_PROCESS, self.pid)
            os.setpriority(os.PRIO_PROCESS, self.pid, min(nice, 19))

    def stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None

    def close(self) -> None:
        """Hear nothing more from it; killing the process is the zygote's part."""
        self.stop_watch()
        if self._is_open:
            self._last_progress = self._page.read()
            self._page.close()
            self._is_open = False
            if self._transport is not None:
                self._transport.abort()

    def _progress(self) -> Progress:
        return self._page.read() if self._is_open else self._last_progress


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
