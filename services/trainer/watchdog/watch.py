"""Outside the ranks: notices that none of them makes progress, and collects what they can tell."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import structlog

from services.trainer.watchdog.beacon import REQUEST_FILE
from services.trainer.watchdog.diagnosis import Diagnosis, diagnose

log = structlog.get_logger()
COLLECT_S = 5.0  # longest wait for ranks to dump their traces
_PROCESS_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "D": "in an uninterruptible system call",
}


class Watch:
    """Of the ranks that leave their beacons in `folder`; `stall_s` is the bound."""

    def __init__(self, folder: Path, *, num_ranks: int, stall_s: float) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._stall_s = stall_s
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("rank*"):
            path.unlink()  # of ranks before these

    async def stalled(self, patience_s: float = 0.0) -> Diagnosis:
        """Returns once no rank has made progress for `stall_s` (or `patience_s`, if that is more),
        with what could be found out.

        By this process's clock: clocks of nodes need not agree.
        """
        bound_s = max(self._stall_s, patience_s)
        seen: dict[int, int] = {}
        since_s = time.monotonic()
        while (quiet_s := time.monotonic() - since_s) < bound_s:
            numbers = {rank: int(one["number"]) for rank, one in self._beacons().items()}
            if numbers != seen:
                seen, since_s = numbers, time.monotonic()
            await asyncio.sleep(min(1.0, self._stall_s / 10))
        diagnosis = await self.diagnosis(quiet_s)
        log.error("ranks_stalled", **diagnosis.document())
        return diagnosis

    async def diagnosis(self, quiet_s: float) -> Diagnosis:
        """Ask all ranks for their traces and write `stall-<time>.json` beside them."""
        asked = f"{time.time_ns()}"
        building = self._folder / ".request.building"
        building.write_text(asked)
        building.rename(self._folder / REQUEST_FILE)
        deadline_s = time.monotonic() + COLLECT_S
        while len(traces := self._traces(asked)) < self._num_ranks:
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        beacons = self._beacons()
        states = {
            rank: self._state(beacons.get(rank))
            for rank in range(self._num_ranks)
            if rank not in traces
        }
        found = diagnose(beacons, traces, states, quiet_s=quiet_s)
        self._write_report(asked, found, beacons, traces)
        return found

    def _beacons(self) -> dict[int, dict[str, Any]]:
        return {int(one["rank"]): one for one in self._read("rank*.json")}

    def _traces(self, asked: str) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self._num_ranks):
            for answer in self._read(f"rank{rank}.trace"):
                if answer["answers"] == asked:
                    found[rank] = answer["trace"]
        return found

    def _read(self, pattern: str) -> list[Any]:
        """Files appear whole, by a rename."""
        return [json.loads(path.read_text()) for path in self._folder.glob(pattern)]

    def _state(self, beacon: dict[str, Any] | None) -> str:
        """Of a rank that did not answer."""
        if beacon is None:
            return "never started"
        if beacon["host"] != socket.gethostname():
            return f"no answer from {beacon['host']}"
        stat = Path(f"/proc/{beacon['pid']}/stat")
        if not stat.exists():
            return "dead"
        letter = stat.read_text().rpartition(")")[2].split()[0]
        if letter in _PROCESS_STATES:
            return _PROCESS_STATES[letter]
        with contextlib.suppress(ProcessLookupError):  # its stack, without its help
            os.kill(beacon["pid"], signal.SIGUSR1)
        return "no answer; its stack is in the watchdog folder"

    def _write_report(
        self, asked: str, found: Diagnosis, beacons: dict[int, Any], traces: dict[int, Any]
    ) -> None:
        stacks = {
            path.stem: path.read_text(errors="replace") for path in self._folder.glob("*.stack")
        }
        body = {
            **found.document(),
            "beacons": {str(rank): one for rank, one in sorted(beacons.items())},
            "traces": {str(rank): one for rank, one in sorted(traces.items())},
            "stacks": stacks,
        }
        (self._folder / f"stall-{asked}.json").write_text(json.dumps(body, indent=2) + "\n")
