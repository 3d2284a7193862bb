"""Brings every rollout server to the version it should serve, and keeps it there.

    replicas ──> serves its target? ──no──> begin ─> poll ─> commit ──> serving
                    ^                                 └─ fails: abort, quarantine, back-off ─┐
                    └────────────────────────────────────────────────────────────────────────┘

One mechanism for new versions, late joiners, restarted servers and servers released from a hold:
the target of a server is the version it is held at, or else the one rolled back to, or else the
current one. Servers are updated in parallel; a slow or dead one costs the others nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import structlog
from redis.asyncio import Redis

from services.trainer.arbiter import Arbiter
from services.trainer.canary import Canary
from services.trainer.delivery import Delivery
from services.trainer.events import EventLog, EventMaker
from services.trainer.fanout import Fanout
from services.trainer.rounds import Rounds
from services.trainer.servers import MAX_REFUSALS, Server
from services.trainer.update_notes import UpdateNotes
from services.trainer.versions import VersionStore
from shared import topology
from shared.errors import TandemError
from shared.http import HttpClient
from shared.job_rollout import UpdateSection
from shared.messages import WeightsAnnounced
from shared.registry import Replica, live_replicas
from shared.tasks import end, wait_for_event
from shared.telemetry import gauge, now_s
from shared.weights.protocol import Probe

log = structlog.get_logger()
NOT_READY = ("idle", "starting", "stopped")


class VersionRefused(TandemError):
    """The canary, or every live server, says that the version cannot be served."""


class NoServerLeft(TandemError):
    """Every rollout server of the job has given up starting its engine."""


class Publisher:
    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        trainer_url: str,
        shards_url: str,
        store: VersionStore,
        update: UpdateSection,
        http: HttpClient,
        record: EventLog,
        events: EventMaker,
        holds: Callable[[], Mapping[str, int]],
        digest: Callable[[Path], Awaitable[str]],
        owners: Callable[[], list[str]] = list,
        rounds: Rounds | None = None,
        needed_versions: Callable[[], Collection[int]] = tuple,
        canary: bool = True,
        max_parallel: int = 16,
        interval_s: float = 0.3,
    ) -> None:
        """`digest(folder)`: the ranks' effective checksum of what they published."""
        self.current: int | None = None
        self.rolled_back_to: int | None = None
        self.probing = True  # a preflight compares what a probe would
        self.on_rollback_refused: Callable[[str], Awaitable[None]] = _nobody
        self._redis = redis
        self._job_id = job_id
        self._trainer_url = trainer_url
        self._store = store
        self._update = update
        self._notes = UpdateNotes(record, events, num_servers=lambda: len(self._servers))
        self._holds = holds
        self._rounds = rounds
        self._needed_versions = needed_versions
        self._canary = Canary(self._is_asked) if canary else None
        self._interval_s = interval_s
        self._fanout = Fanout(shards_url, max_sends=update.max_sends)
        self._servers: dict[str, Server] = {}
        self._troubles: dict[str, Replica] = {}  # servers without an engine
        self.tidying = asyncio.Lock()  # who makes an older version a target finds it under this
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._delivery = Delivery(
            redis,
            job_id=job_id,
            store=store,
            update=update,
            http=http,
            fanout=self._fanout,
            canary=self._canary,
            rounds=rounds,
            arbiter=Arbiter(store, digest),
            servers=self._servers.values,
            owners=owners,
            probe=lambda version: self.probe(version) if self.probing else None,
            notes=self._notes,
            on_moved=self._moved.set,
            max_parallel=max_parallel,
        )

    async def publish(self, version: int) -> None:
        """Make `version` current: late joiners find it, and every free server gets it."""
        if version != self.current:
            self._notes.announced(version)
        self.current = version
        gauge("trainer_policy_version", "The version that servers are to serve.").set(version)
        await self.announce()
        self.reconsider()

    @property
    def target(self) -> int | None:
        """What servers that are not held are to serve."""
        return self.current if self.rolled_back_to is None else self.rolled_back_to

    async def roll_back(self, version: int | None) -> None:
        """Have every free server serve an older version again, under its own number.

        None ends it: back to the current one.
        """
        self.rolled_back_to = version
        for server in self._servers.values():
            server.forget_refusals()
        if self._canary:
            self._canary.forget_refusals()
        await self.announce()
        self.reconsider()

    async def announce(self) -> None:
        """Write the version to serve where late joiners and servers look."""
        if self.target is None:
            return
        body = WeightsAnnounced(
            job_id=self._job_id,
            policy_version=self.target,
            trainer_url=self._trainer_url,
            published_at_s=now_s(),
        )
        await self._redis.set(topology.weights_current(self._job_id), body.pack())

    def reconsider(self) -> None:
        """Look at the targets again now, for one has changed."""
        self._wake.set()

    @property
    def names(self) -> list[str]:
        """Live servers of this job."""
        return sorted(self._servers)

    def serving(self, version: int) -> list[str]:
        """Live servers that serve exactly `version`, by name."""
        return sorted(name for name, one in self._servers.items() if one.serves(version))

    def probe(self, version: int) -> Probe | None:
        """What servers must pass to serve `version`."""
        return self._store.probe(version)

    def addresses(self, version: int) -> dict[str, str]:
        """Of live servers that serve exactly `version`, by name."""
        return {name: self._servers[name].record.url for name in self.serving(version)}

    def describe(self) -> dict[str, str]:
        """What each server is at, for people: 'serving 3, held', 'updating to 4'."""
        holds = self._holds()
        broken = {name: f"no engine: {one.trouble}" for name, one in self._troubles.items()}
        return broken | {name: one.describe(holds.get(name)) for name, one in self._by_name()}

    async def wait_served(self, version: int, *, deadline_s: float) -> bool:
        """Whether a server came to serve `version` in time, or every live one is held elsewhere."""
        ends_s = time.monotonic() + deadline_s
        while not self.serving(version):
            held = self._holds()
            if self._servers and all(held.get(name, version) != version for name in self._servers):
                return False
            if (left_s := ends_s - time.monotonic()) <= 0:
                return False
            self._moved.clear()
            await wait_for_event(self._moved, min(left_s, 1.0))
        return True

    async def wait_settled(self, version: int, *, grace_s: float) -> None:
        """Give servers that are on their way to `version` a while to arrive."""
        ends_s = time.monotonic() + grace_s
        while any(one.is_going_to(version) for one in self._servers.values()):
            if (left_s := ends_s - time.monotonic()) <= 0:
                return
            self._moved.clear()
            await wait_for_event(self._moved, left_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Reconcile until `stop`, then end what is in flight.

        Raises `VersionRefused` when the canary, or each server, has refused the current version
        several times, and `NoServerLeft`.
        """
        try:
            while not stop.is_set():
                self._wake.clear()
                await self._reconcile()
                await wait_for_event(self._wake, self._interval_s)
        finally:
            await asyncio.gather(*(end(one.task) for one in self._servers.values() if one.task))
            if self._rounds is not None:
                await self._rounds.close()

    async def _reconcile(self) -> None:
        live = {one.name: one for one in await live_replicas(self._redis, "rollout")}
        mine = {
            n: r for n, r in live.items() if r.job_id == self._job_id and r.state not in NOT_READY
        }
        for name in self._servers.keys() - mine.keys():
            await self._forget(name)
        for name, replica in mine.items():
            server = await self._known(replica)
            target = self._holds().get(name, self.target)
            if target is None or server.serves(target) or server.is_updating:
                continue
            if server.version != target and self._is_left_to_canary(server, target):
                continue
            if not server.is_quarantined and self._store.manifest(target) is not None:
                server.updating_to = target
                server.task = asyncio.create_task(
                    self._delivery.bring(server, target), name=f"update {name}"
                )
        await self._tidy()
        self._look_at_engines([one for one in live.values() if one.job_id == self._job_id])
        await self._check_refusals()

    def _look_at_engines(self, replicas: Collection[Replica]) -> None:
        """Tell of each server that has no engine; without any other the job cannot go on."""
        before = self._troubles
        self._troubles = {one.name: one for one in replicas if one.trouble}
        for name, one in self._troubles.items():
            known = before.get(name)
            if known is None or (known.trouble, known.gave_up) != (one.trouble, one.gave_up):
                self._notes.not_started(name, one.trouble, gave_up=one.gave_up)
        if replicas and all(one.gave_up for one in replicas):
            reasons = "; ".join(f"{n}: {one.trouble}" for n, one in self._troubles.items())
            raise NoServerLeft(f"no rollout server can start its engine. {reasons}")

    async def _check_refusals(self) -> None:
        """No server can serve the target: the job cannot go on, or a rollback is given up."""
        version, held = self.target, self._holds()
        free = [(name, one) for name, one in self._by_name() if name not in held]
        if version is None or not free or self.serving(version):
            return
        if version == self.current and self._store.effective(version) is not None:
            return  # some server has served it
        if (error := self._refusal(version, free)) is None:
            return
        if version == self.current:
            raise VersionRefused(error)
        await self.on_rollback_refused(error)

    def _refusal(self, version: int, free: list[tuple[str, Server]]) -> str | None:
        """Why it cannot be served, once it was refused as often as there are chances."""
        told = f"version {version} was refused {MAX_REFUSALS} times by"
        if self._canary and (name := self._canary.of(version)):
            canary = self._servers[name]
            if not canary.has_refused(version):
                return None
            return f"{told} {name}, the first server to try it; no other did. {canary.last_error}"
        if not all(one.has_refused(version) for _, one in free):
            return None
        return f"{told} every server. " + "; ".join(f"{n}: {one.last_error}" for n, one in free)

    def _is_asked(self, name: str, version: int) -> bool:
        """Whether that server is there and is to serve `version`."""
        return name in self._servers and self._holds().get(name, self.target) == version

    def _is_left_to_canary(self, server: Server, version: int) -> bool:
        if self._canary is None or self._store.effective(version) is not None:
            return False
        return self._canary.is_left_to_another(version, server.name)

    async def _known(self, replica: Replica) -> Server:
        server = self._servers.get(replica.name)
        if server is None or not server.is_same(replica):
            await self._forget(replica.name)
            server = self._servers[replica.name] = Server(replica, replica.policy_version)
            self._moved.set()
        server.look_at(replica)
        if server.task is not None and server.task.done():
            server.task.result()  # what no transaction should raise ends the job
            server.task = None
        return server

    async def _forget(self, name: str) -> None:
        if gone := self._servers.pop(name, None):
            self._fanout.forget_server(name)
            if self._canary:
                self._canary.forget_server(name)
            self._moved.set()
            if gone.task:
                await end(gone.task)

    async def _tidy(self) -> None:
        """Versions that are current, held, or being read by a server stay whole."""
        if self.current is None:
            return
        update = self._update
        async with self.tidying:
            targets = {self.current, self.target, *self._holds().values()}
            targets |= set(self._needed_versions())
            targets |= {one.updating_to for one in self._servers.values() if one.is_updating}
            needed = {one for one in targets if one is not None}
            gone = await asyncio.to_thread(
                self._store.tidy,
                needed,
                keep_last=update.keep_versions,
                keep_bytes=update.keep_bytes,
            )
        self._fanout.keep_only(needed)
        if self._canary:
            self._canary.keep_only(needed)
        if gone:
            log.info("versions_deleted", policy_versions=gone)

    def _by_name(self) -> list[tuple[str, Server]]:
        return sorted(self._servers.items())


async def _nobody(_: str) -> None:
    """Hears of a rollback that is refused."""
