"""Brings every rollout server to the version it should serve, and keeps it there.

    replicas ──> serves its target? ──no──> begin ─> poll ─> commit ──> serving
                    ^                                 └─ fails: abort, quarantine, back-off ─┐
                    └────────────────────────────────────────────────────────────────────────┘

One mechanism for new versions, late joiners, restarted servers and servers released from a hold:
the target of a server is the version it is held at, or else the current one. Servers are updated
in parallel; a slow or dead one costs the others nothing. The first commit of a version goes alone
(the canary): a version that no server accepts reaches no server.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis

from services.trainer.events import EventLog, EventMaker
from services.trainer.versions import VersionStore
from shared import topology
from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.job import UpdateSection
from shared.messages import WeightsAnnounced
from shared.registry import Replica, live_replicas
from shared.tasks import end, wait_for_event
from shared.telemetry import counter, gauge, now_s
from shared.weights.manifest import Manifest
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, UpdateStatus

log = structlog.get_logger()
POLL_S = 0.05
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
REGISTRY_DELAY_S = 3.0  # a record may be this much older than what a commit answered
CALL_S = 10.0
NOT_READY = ("idle", "starting", "stopped")


class UpdateFailed(TandemError):
    """A server said that an update cannot be applied, or said something else than asked."""


@dataclass(slots=True)
class _Server:
    """What we know of one live replica."""

    record: Replica
    version: int | None = None
    committed_at_s: float = -REGISTRY_DELAY_S
    failures: int = 0
    retry_at_s: float = 0.0
    updating_to: int | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_updating(self) -> bool:
        return self.task is not None and not self.task.done()

    def is_going_to(self, version: int) -> bool:
        return self.is_updating and self.updating_to == version and self.version != version


class Publisher:
    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        trainer_url: str,
        store: VersionStore,
        update: UpdateSection,
        http: HttpClient,
        record: EventLog,
        events: EventMaker,
        holds: Callable[[], Mapping[str, int]],
        canary: bool = True,
        max_parallel: int = 16,
        interval_s: float = 0.3,
    ) -> None:
        self.current: int | None = None
        self._redis = redis
        self._job_id = job_id
        self._trainer_url = trainer_url
        self._store = store
        self._update = update
        self._http = http
        self._record = record
        self._events = events
        self._holds = holds
        self._canary = canary
        self._interval_s = interval_s
        self._servers: dict[str, _Server] = {}
        self._slots = asyncio.Semaphore(max_parallel)
        self._first_commit = asyncio.Lock()
        self._accepted: set[int] = set()  # versions that some server has committed
        self._announced_at_s = 0.0
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()

    async def publish(self, version: int) -> None:
        """Make `version` current: late joiners find it, and every free server gets it."""
        self.current = version
        self._announced_at_s = time.monotonic()
        gauge("trainer_policy_version", "The version that servers are to serve.").set(version)
        await self.announce()
        self.reconsider()

    async def announce(self) -> None:
        """Write the current version where late joiners and servers look."""
        if self.current is None:
            return
        body = WeightsAnnounced(
            job_id=self._job_id,
            policy_version=self.current,
            trainer_url=self._trainer_url,
            published_at_s=now_s(),
        )
        await self._redis.set(topology.weights_current(self._job_id), body.pack())

    def reconsider(self) -> None:
        """Look at the targets again now, for one has changed."""
        self._wake.set()

    def serving(self, version: int) -> list[str]:
        """Live servers that serve exactly `version`, by name."""
        return sorted(name for name, one in self._servers.items() if one.version == version)

    def describe(self) -> dict[str, str]:
        """What each server is at, for people: 'serving 3, held', 'updating to 4'."""
        return {name: self._describe(name, one) for name, one in sorted(self._servers.items())}

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
        """Reconcile until `stop`, then end what is in flight."""
        try:
            while not stop.is_set():
                self._wake.clear()
                await self._reconcile()
                await wait_for_event(self._wake, self._interval_s)
        finally:
            await asyncio.gather(*(end(one.task) for one in self._servers.values() if one.task))

    async def _reconcile(self) -> None:
        live = {one.name: one for one in await live_replicas(self._redis, "rollout")}
        mine = {
            n: r for n, r in live.items() if r.job_id == self._job_id and r.state not in NOT_READY
        }
        for name in self._servers.keys() - mine.keys():
            await self._forget(name)
        for name, replica in mine.items():
            server = await self._known(replica)
            target = self._holds().get(name, self.current)
            if target is None or server.version == target or server.is_updating:
                continue
            if time.monotonic() >= server.retry_at_s and self._store.manifest(target) is not None:
                server.updating_to = target
                server.task = asyncio.create_task(
                    self._bring(server, target), name=f"update {name}"
                )
        self._delete_unneeded()

    async def _known(self, replica: Replica) -> _Server:
        server = self._servers.get(replica.name)
        if server is None or server.record.pid != replica.pid or server.record.url != replica.url:
            await self._forget(replica.name)
            server = self._servers[replica.name] = _Server(replica, replica.policy_version)
            self._moved.set()
        server.record = replica
        if time.monotonic() - server.committed_at_s > REGISTRY_DELAY_S:
            server.version = replica.policy_version
        return server

    async def _forget(self, name: str) -> None:
        if gone := self._servers.pop(name, None):
            self._moved.set()
            if gone.task:
                await end(gone.task)

    def _delete_unneeded(self) -> None:
        """Versions that are current, held, or being read by a server stay."""
        if self.current is None:
            return
        needed = {self.current, *self._holds().values()}
        needed |= {
            one.updating_to
            for one in self._servers.values()
            if one.updating_to is not None and one.is_updating
        }
        gone = self._store.delete_all_but(needed, keep_last=self._update.keep_versions)
        if gone:
            log.info("versions_deleted", policy_versions=gone)

    async def _bring(self, server: _Server, version: int) -> None:
        """One transaction; whatever goes wrong, the server is left on what it serves."""
        began_s = time.monotonic()
        stage_s = 0.0
        try:
            async with self._slots:
                manifest = self._store.manifest(version)
                if manifest is None or await self._serves_already(server, version):
                    return
                await self._stage(server, manifest)
                stage_s = time.monotonic() - began_s
                result = await self._commit(server, version)
        except (HttpFailed, UpdateFailed, DeadlineExceeded) as err:
            await self._abort(server, version)
            self._quarantine(server, version, str(err))
        else:
            self._committed(server, version)
            self._record.note(
                self._events(
                    "update_committed",
                    server=server.record.name,
                    policy_version=version,
                    stage_s=stage_s,
                    bytes=manifest.num_bytes,
                    seconds=time.monotonic() - began_s,
                    **result.model_dump(exclude={"version"}),
                )
            )
            self._note_published(version, manifest)

    async def _serves_already(self, server: _Server, version: int) -> bool:
        """The registry lags; the server itself knows."""
        info = await self._http.get(f"{server.record.url}/v1/info", timeout_s=CALL_S)
        if (
            info.get("policy_version") != version
            or info.get("job_id", self._job_id) != self._job_id
        ):
            return False
        self._committed(server, version)
        return True

    async def _stage(self, server: _Server, manifest: Manifest) -> None:
        """Have the server pull and verify the shards; the old version serves meanwhile."""
        deadline_s = self._update.deadline_s
        ends_s = time.monotonic() + deadline_s
        updates = f"{server.record.url}/v1/weights/updates"
        begin = BeginUpdate(
            job_id=self._job_id,
            version=manifest.policy_version,
            manifest=manifest,
            sources=[self._trainer_url],
        )
        body = begin.model_dump(mode="json")
        answer = await self._http.post(updates, body, timeout_s=CALL_S, idempotent=True)
        status = UpdateStatus.model_validate(answer)
        while status.state not in ("staged", "active"):
            if status.state in ("failed", "aborted"):
                raise UpdateFailed(f"staging {status.state}: {status.error}")
            if time.monotonic() > ends_s:
                what = f"{server.record.name} to stage version {manifest.policy_version}"
                progress = f"{status.staged_bytes} of {status.total_bytes} bytes"
                raise DeadlineExceeded(f"{what} ({progress})", deadline_s)
            await asyncio.sleep(POLL_S)
            answer = await self._http.get(f"{updates}/{manifest.policy_version}", timeout_s=CALL_S)
            status = UpdateStatus.model_validate(answer)

    async def _commit(self, server: _Server, version: int) -> CommitResult:
        """Activate. As long as no server has accepted the version they try one at a time."""
        if self._canary and version not in self._accepted:
            async with self._first_commit:
                if version not in self._accepted:
                    result = await self._commit_now(server, version)
                    self._accepted.add(version)
                    return result
        return await self._commit_now(server, version)

    async def _commit_now(self, server: _Server, version: int) -> CommitResult:
        commit = CommitUpdate(pause_mode=self._update.pause_mode, probe=self._store.probe(version))
        answer = await self._http.post(
            f"{server.record.url}/v1/weights/updates/{version}/commit",
            commit.model_dump(mode="json"),
            timeout_s=self._update.deadline_s,
        )
        result = CommitResult.model_validate(answer)
        if result.version != version:
            raise UpdateFailed(f"commit of {version} was answered for version {result.version}")
        return result

    async def _abort(self, server: _Server, version: int) -> None:
        """Best effort: a server that does not hear it drops the update at its next one."""
        with contextlib.suppress(HttpFailed):
            url = f"{server.record.url}/v1/weights/updates/{version}"
            await self._http.request("DELETE", url, timeout_s=CALL_S)

    def _committed(self, server: _Server, version: int) -> None:
        server.version = version
        server.committed_at_s = time.monotonic()
        server.failures = 0
        self._moved.set()
        counter("trainer_updates_total", "Weight updates.", ("outcome",)).labels("committed").inc()

    def _quarantine(self, server: _Server, version: int, error: str) -> None:
        """The server gets no update for a while, longer each time."""
        backoff_s = min(FIRST_BACKOFF_S * 2**server.failures, MAX_BACKOFF_S)
        server.failures += 1
        server.retry_at_s = time.monotonic() + backoff_s
        server.updating_to = None
        self._moved.set()
        counter("trainer_updates_total", "Weight updates.", ("outcome",)).labels("failed").inc()
        name = server.record.name
        log.warning("update_failed", server=name, policy_version=version, error=error)
        self._record.note(
            self._events(
                "update_failed",
                server=name,
                policy_version=version,
                error=error,
                retry_in_s=backoff_s,
            )
        )

    def _note_published(self, version: int, manifest: Manifest) -> None:
        """Told once per version: when its first server serves it."""
        if version != self.current or self._announced_at_s == 0.0:
            return
        seconds = time.monotonic() - self._announced_at_s
        self._announced_at_s = 0.0
        self._record.note(
            self._events(
                "weights_published",
                policy_version=version,
                bytes=manifest.num_bytes,
                seconds=seconds,
                servers=len(self._servers),
            )
        )

    def _describe(self, name: str, server: _Server) -> str:
        if server.is_updating:
            told = f"updating to {server.updating_to}"
        elif server.version is None:
            told = "without weights"
        else:
            told = f"serving {server.version}"
        if name in self._holds():
            told += f", held at {self._holds()[name]}"
        if server.failures:
            told += f", {server.failures} failed updates"
        return told
