"""One more node of the actor: starts and ends its ranks as the conductor's node says.

    python -m services.trainer.node --conductor http://HEAD:8700 --node 1

All nodes share the run folder: every rank keeps its shards, its part of checkpoints and what it is
doing there. A node that finds another folder in its place says so, and no job waits for it; nor
for ranks that ended by themselves.
Ranks end when the conductor starts others, when it wants none, and when it has not been heard of
for `--lost-s`: then nobody waits for them any more.
"""

import argparse
import asyncio
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import structlog
from pydantic import ValidationError

from services.trainer.launch import (
    LEARNER,
    MARK,
    REASON_CHARS,
    RECORD_FILE,
    Launch,
    Refusal,
    mark_of,
)
from services.trainer.ranks import LOG_FILE, tail
from shared.errors import HttpFailed
from shared.http import HttpClient
from shared.process import die_with_parent, kill_marked, prepare_to_fork
from shared.telemetry import configure_logging

log = structlog.get_logger()
POLL_S = 0.5
# A shared file system may show what another node has written only after a while.
FOLDER_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="services.trainer.node", description=__doc__)
    parser.add_argument("--conductor", required=True, metavar="URL")
    parser.add_argument("--node", required=True, type=int, help="1 and up; the conductor's is 0")
    parser.add_argument("--lost-s", type=float, default=60.0)
    given = parser.parse_args()
    configure_logging("trainer", replica=f"node{given.node}")
    asyncio.run(Node(given.conductor, number=given.node, lost_s=given.lost_s).run())


class Node:
    """`program` replaces the learner in tests; the conductor's word on it is not taken."""

    def __init__(
        self,
        conductor: str,
        *,
        number: int,
        lost_s: float,
        folder_s: float = FOLDER_S,
        program: tuple[str, ...] = LEARNER,
    ) -> None:
        self._url = f"{conductor.rstrip('/')}/v1/launch"
        self._number, self._lost_s, self._program = number, lost_s, list(program)
        self._folder_s = folder_s
        self._looked_for = (0, 0.0)  # which start's folder, since when
        self._told_ended = 0  # of which start
        self._running: Launch | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Follow the conductor until cancelled."""
        heard_s = time.monotonic()
        async with HttpClient(timeout_s=5) as client:
            try:
                while True:
                    try:
                        wanted = await self._wanted(client)
                        heard_s = time.monotonic()
                        can_start = await self._can_start(client, wanted)
                        await self._follow(wanted if can_start else None)
                        await self._tell_ended(client)
                    except HttpFailed as err:
                        if time.monotonic() - heard_s > self._lost_s and self._running:
                            log.warning("conductor_lost", after_s=self._lost_s, error=str(err))
                            await self._end()
                    await asyncio.sleep(POLL_S)
            finally:
                await self._end()

    async def _wanted(self, client: HttpClient) -> Launch | None:
        document = await client.get(self._url)
        try:
            launch = Launch.model_validate(document) if document else None
        except ValidationError as err:
            log.warning("launch_refused", error=str(err))
            return None
        is_here = launch is not None and self._number < launch.nodes
        return launch.model_copy(update={"program": self._program}) if launch and is_here else None

    async def _can_start(self, client: HttpClient, wanted: Launch | None) -> bool:
        """Not while its run folder is not to be seen here; after a while the conductor is told."""
        running = self._running.number if self._running else None
        if wanted is None or wanted.number == running or wanted.shares_folder():
            return True
        if self._looked_for[0] != wanted.number:
            self._looked_for = (wanted.number, time.monotonic())
        elif time.monotonic() - self._looked_for[1] > self._folder_s:
            reason = (
                f"{wanted.run_dir} here is not the conductor's ({RECORD_FILE} in it is missing or "
                f"of another start): actor nodes must share the run folder at the same path"
            )
            log.warning("launch_refused", error=reason)
            refusal = Refusal(number=wanted.number, node=self._number, reason=reason)
            await client.post(f"{self._url}/refusals", refusal.model_dump(), idempotent=True)
            self._looked_for = (wanted.number, time.monotonic())
        return False

    async def _follow(self, wanted: Launch | None) -> None:
        """Ranks that ended by themselves stay so: the conductor says what comes next."""
        running = self._running.number if self._running else None
        if running == (wanted.number if wanted else None):
            return
        await self._end()
        if wanted is not None:
            await self._start(wanted)

    async def _tell_ended(self, client: HttpClient) -> None:
        """Ranks here may die before those of other nodes know them, who would wait for long."""
        if self._running is None or self._process is None or not self._process.returncode:
            return
        if self._told_ended != self._running.number:
            log_file = self._log_file(self._running)
            reason = f"its torchrun ended with code {self._process.returncode}; {tail(log_file)}"
            log.warning("ranks_lost", error=reason)
            lost = Refusal(
                number=self._running.number,
                node=self._number,
                reason=reason[:REASON_CHARS],
                started=True,
            )
            await client.post(f"{self._url}/refusals", lost.model_dump(), idempotent=True)
            self._told_ended = self._running.number

    def _log_file(self, launch: Launch) -> Path:
        return Path(launch.run_dir) / f"node{self._number}.{LOG_FILE}"

    async def _start(self, launch: Launch) -> None:
        prepare_to_fork()
        kill_marked(MARK, mark_of(launch.run_dir, self._number))  # of a node killed before
        with self._log_file(launch).open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *launch.command(self._number),
                env=launch.variables(self._number),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._running = launch
        log.info("ranks_started", pid=self._process.pid, ranks=launch.ranks_per_node)

    async def _end(self) -> None:
        if self._running is None or self._process is None:
            return
        kill_marked(MARK, mark_of(self._running.run_dir, self._number))
        await self._process.wait()
        log.info("ranks_ended", code=self._process.returncode)
        self._running = self._process = None


if __name__ == "__main__":
    main()
