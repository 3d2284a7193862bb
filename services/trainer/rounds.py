"""Servers that need a version at the same time take it from the ranks through one process group.

first server ──opens a round──> others join for a moment ──> ranks and servers meet, broadcast
                                                              └─ any trouble: servers pull
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from shared.errors import TandemError
from shared.process import free_port
from shared.tasks import end
from shared.weights.protocol import GroupTransfer

log = structlog.get_logger()

GATHER_S = 0.3  # how long a round waits for further servers
Send = Callable[[int, Sequence[GroupTransfer]], Awaitable[str]]  # what went wrong


@dataclass(slots=True)
class _Round:
    servers: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0  # still 0 when it is closed: there is no group
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


class Rounds:
    """`send(version, transfers of the owners)` has the ranks broadcast."""

    def __init__(
        self, send: Send, *, backend: Literal["gloo", "nccl"], host: str, deadline_s: float
    ) -> None:
        self._send = send
        self._backend = backend
        self._host = host
        self._deadline_s = deadline_s
        self._open: dict[int, _Round] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def join(self, version: int, server: str, *, num_owners: int) -> GroupTransfer | None:
        """The server's part in the round that is open for `version`, or opens with it.

        None if no group could be opened: then the server pulls.
        """
        if version not in self._open:
            opened = self._open[version] = _Round()
            # A task of its own: a server that goes away while it waits must not keep the others.
            gathering = self._start(self._gather(version, num_owners), f"gather {version}")
            # However it ends, nobody waits for a round that is over.
            gathering.add_done_callback(lambda _: self._end(version, opened))
        found = self._open[version]
        place = len(found.servers)
        found.servers.append(server)
        await found.closed.wait()
        return self._transfer(found, num_owners + place, num_owners) if found.port else None

    async def close(self) -> None:
        for task in list(self._running):
            await end(task)

    async def _gather(self, version: int, num_owners: int) -> None:
        """Let servers join for a while, then have the owners meet them."""
        await asyncio.sleep(GATHER_S)
        found = self._open.pop(version)
        try:
            found.port = free_port()
        except OSError as err:
            log.warning("group_failed", policy_version=version, error=f"no free port: {err}")
            return
        owners = [self._transfer(found, rank, num_owners) for rank in range(num_owners)]
        self._start(self._run(version, owners), f"send {version}")

    def _end(self, version: int, found: _Round) -> None:
        if self._open.get(version) is found:
            del self._open[version]
        found.closed.set()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, version: int, owners: Sequence[GroupTransfer]) -> None:
        try:
            error = await self._send(version, owners)
        except TandemError as err:
            error = str(err)
        if error:
            log.warning("group_failed", policy_version=version, error=error)

    def _transfer(self, found: _Round, rank: int, num_owners: int) -> GroupTransfer:
        return GroupTransfer(
            name=found.name,
            backend=self._backend,
            host=self._host,
            port=found.port,
            rank=rank,
            members=[*(f"rank {owner}" for owner in range(num_owners)), *found.servers],
            deadline_s=self._deadline_s,
        )
