"""Brings every rollout server to the version it should serve, and keeps it there.

    replicas ──> serves its target? ──no──> begin ─> poll ─> commit ──> serving
                    ^                                 └─ fails: abort, quarantine, back-off ─┐
                    └────────────────────────────────────────────────────────────────────────┘

One mechanism for new versions, late joiners, restarted servers and servers released from a hold:
the target of a server is the version it is held at, or else the one rolled back to, or else the
current one. Servers are updated in parallel; a slow or dead one costs the others nothing. The first
commit of a version goes alone (the canary), and who refuses it is asked again before any other: a
version that fails its probe reaches one server. Its effective checksum is noted, and a server
counts as serving the version once it has said the same.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog
from prometheus_client import Counter
from redis.asyncio import Redis

from services.trainer.canary import Canary, LeftToCanary
from services.trainer.events import EventLog, EventMaker
from services.trainer.fanout import Fanout
from services.trainer.rounds import Rounds
from services.trainer.servers import MAX_REFUSALS, Server
from services.trainer.stopwatch import Stopwatch
from services.trainer.transactions import Transaction, UpdateFailed, is_refusal
from services.trainer.versions import VersionStore
from shared import topology
from shared.errors import DeadlineExceeded, HttpFailed, TandemError, WeightsCorrupt
from shared.http import HttpClient
from shared.job_rollout import UpdateSection
from shared.messages import WeightsAnnounced
from shared.registry import Replica, live_replicas, register
from shared.tasks import end, wait_for_event
from shared.telemetry import counter, gauge, now_s
from shared.weights.manifest import Manifest
from shared.weights.protocol import (
    BeginUpdate,
    CommitResult,
    CommitUpdate,
    Probe,
    UpdateStatus,
)

log = structlog.get_logger()
NOT_READY = ("idle", "starting", "stopped")


class VersionRefused(TandemError):
    """The canary, or every live server, says that the version cannot be served."""


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
        owners: Callable[[], list[str]] = list,
        rounds: Rounds | None = None,
        needed_versions: Callable[[], Collection[int]] = tuple,
        canary: bool = True,
        max_parallel: int = 16,
        interval_s: float = 0.3,
    ) -> None:
        self.current: int | None = None
        self.rolled_back_to: int | None = None
        self.probing = True  # a preflight compares what a probe would
        self.on_rollback_refused: Callable[[str], Awaitable[None]] = _nobody
        self._redis = redis
        self._job_id = job_id
        self._trainer_url = trainer_url
        self._store = store
        self._update = update
        self._http = http
        self._record = record
        self._events = events
        self._holds = holds
        self._owners = owners
        self._rounds = rounds
        self._needed_versions = needed_versions
        self._canary = Canary(self._is_asked) if canary else None
        self._interval_s = interval_s
        self._fanout = Fanout(shards_url, max_sends=update.max_sends)
        self._servers: dict[str, Server] = {}
        self._slots = asyncio.Semaphore(max_parallel)
        self._announced_at_s: float | None = None
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()

    async def publish(self, version: int) -> None:
        """Make `version` current: late joiners find it, and every free server gets it."""
        if version != self.current:
            self._announced_at_s = time.monotonic()
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
        return {name: one.describe(holds.get(name)) for name, one in self._by_name()}

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
        several times.
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
                    self._bring(server, target), name=f"update {name}"
                )
        await self._tidy()
        await self._check_refusals()

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
        targets = {self.current, self.target, *self._holds().values()}
        targets |= set(self._needed_versions())
        targets |= {one.updating_to for one in self._servers.values() if one.is_updating}
        needed = {one for one in targets if one is not None}
        update = self._update
        gone = await asyncio.to_thread(
            self._store.tidy, needed, keep_last=update.keep_versions, keep_bytes=update.keep_bytes
        )
        self._fanout.keep_only(needed)
        if self._canary:
            self._canary.keep_only(needed)
        if gone:
            log.info("versions_deleted", policy_versions=gone)

    async def _bring(self, server: Server, version: int) -> None:
        """One transaction; whatever goes wrong, the server is left on what it serves."""
        deadline_s = self._update.deadline_s
        update = Transaction(self._http, server_url=server.record.url, deadline_s=deadline_s)
        try:
            async with self._slots:
                if not self._store.is_whole(version):
                    await asyncio.to_thread(self._store.restore, version)
                manifest = self._store.manifest(version)
                if manifest is None:
                    return  # deleted meanwhile: it is no target any more
                if await update.serves_already(self._job_id, version):
                    await self._commit(update, server, version, loads=False)
                    self._note_served(server, version)
                    return
                watch = Stopwatch(f"update {server.name}")
                begin = await self._begin(server, manifest)
                with watch.part("stage_s"):
                    staged = await update.stage(begin)
                with watch.part("commit_s"):
                    result = await self._commit(update, server, version, loads=True)
        except LeftToCanary:
            await update.abort(version)  # what was staged stays there for the next time
            server.updating_to = None
            self._moved.set()
        except (HttpFailed, UpdateFailed, DeadlineExceeded, WeightsCorrupt) as err:
            await update.abort(version)
            self._fanout.note_failed(version, server.name)
            self._note_failed(server, version, err)
        else:
            self._fanout.note_served(version, server.name)
            self._note_served(server, version)
            self._note_committed(server, begin, staged, watch, result)

    async def _begin(self, server: Server, manifest: Manifest) -> BeginUpdate:
        """As changes if the server has what they are changes of."""
        version, served = manifest.policy_version, server.version
        as_changes = manifest.delta is not None and manifest.delta.base_version == served
        url, group = server.record.shards_url, None
        if self._rounds is not None and not as_changes:
            group = await self._rounds.join(version, server.name, num_owners=manifest.num_parts)
        owners = await self._registered_owners(manifest)
        return BeginUpdate(
            job_id=self._job_id,
            version=version,
            base_version=served if as_changes else None,
            manifest=manifest if as_changes else manifest.without_delta(),
            sources=self._fanout.sources(
                version, server.name, url, as_changes=as_changes, has_owners=bool(owners)
            ),
            owners=owners,
            group=group,
            is_rollback=served is not None and served > version,
        )

    async def _registered_owners(self, manifest: Manifest) -> list[str]:
        """Where the ranks serve their parts; servers pull from registered peers only."""
        urls = self._owners()
        if len(urls) < manifest.num_parts or manifest.num_parts == 1:
            return []
        for part, url in enumerate(urls):
            name = f"{self._job_id}-rank-{part}"
            record = Replica(
                service="trainer",
                name=name,
                url=url,
                pid=os.getpid(),
                job_id=self._job_id,
                state="serving",
                shards_url=url,
            )
            await register(self._redis, record)
        return urls

    async def _commit(
        self, update: Transaction, server: Server, version: int, *, loads: bool
    ) -> CommitResult:
        """Activate. As long as no server has accepted the version the canary tries it alone.

        A server that serves it already, as after an answer that was lost, `loads` nothing and only
        says what it has.
        """
        if self._canary and self._store.effective(version) is None:
            async with self._canary.turn(version, server.name, loads=loads):
                if self._store.effective(version) is None:
                    return await self._commit_now(update, version)
        return await self._commit_now(update, version)

    async def _commit_now(self, update: Transaction, version: int) -> CommitResult:
        """Every server must come to the effective checksum of the first."""
        expected = self._store.effective(version)
        commit = CommitUpdate(
            pause_mode=self._update.pause_mode,
            probe=self._store.probe(version) if self.probing else None,
            effective_checksum=expected,
        )
        result = await update.commit(version, commit)
        if (noted := self._store.effective(version)) is None:
            self._store.keep_effective(version, result.effective_checksum)
        elif noted != result.effective_checksum:  # without a canary both began with none
            raise UpdateFailed(
                f"effective checksum {result.effective_checksum} of version {version}, other "
                f"servers have {noted}"
            )
        return result

    def _note_served(self, server: Server, version: int) -> None:
        server.note_committed(version)
        self._moved.set()

    def _note_committed(
        self,
        server: Server,
        begin: BeginUpdate,
        staged: UpdateStatus,
        watch: Stopwatch,
        result: CommitResult,
    ) -> None:
        manifest = begin.manifest
        updates_total().labels("committed").inc()
        pulled = counter("trainer_update_bytes_total", "That servers pulled.", ("kind",))
        pulled.labels("full" if begin.base_version is None else "delta").inc(staged.pulled_bytes)
        self._record.note(
            self._events(
                "update_committed",
                server=server.name,
                policy_version=manifest.policy_version,
                base_version=begin.base_version,
                is_rollback=begin.is_rollback,
                bytes=manifest.num_bytes,
                pulled_bytes=staged.pulled_bytes,
                rebuilt_shards=staged.rebuilt_shards,
                num_shards=len(manifest.shards),
                began_at_s=now_s() - watch.total_s,
                seconds=watch.total_s,
                **watch.parts,
                **result.model_dump(exclude={"version"}),
            )
        )
        self._note_published(manifest)

    def _note_failed(self, server: Server, version: int, err: TandemError) -> None:
        updates_total().labels("failed").inc()
        backoff_s = server.note_failed(version, str(err), is_refusal=is_refusal(err))
        if self._canary and not is_refusal(err):
            self._canary.forget_server(server.name)
        self._moved.set()
        what = {"server": server.name, "policy_version": version, "error": str(err)}
        log.warning("update_failed", **what)
        self._record.note(self._events("update_failed", **what, retry_in_s=backoff_s))

    def _note_published(self, manifest: Manifest) -> None:
        """Told once per version: when its first server serves it."""
        version = manifest.policy_version
        if version != self.current or self._announced_at_s is None:
            return
        seconds = time.monotonic() - self._announced_at_s
        self._announced_at_s = None
        self._record.note(
            self._events(
                "weights_published",
                policy_version=version,
                bytes=manifest.num_bytes,
                seconds=seconds,
                servers=len(self._servers),
            )
        )

    def _by_name(self) -> list[tuple[str, Server]]:
        return sorted(self._servers.items())


async def _nobody(_: str) -> None:
    """Hears of a rollback that is refused."""


def updates_total() -> Counter:
    return counter("trainer_updates_total", "Weight updates.", ("outcome",))
