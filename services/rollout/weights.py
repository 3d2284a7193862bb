"""The update transaction of one server: stage, verify, commit, or leave everything as it was.

     begin ──> staging ──all bytes verified──> staged ──commit──> activating ──> active
                  └── wrong bytes, shapes, dtypes; abort; deadline ──> failed | aborted
                                                                       (the old version serves)

Nothing the engine serves is touched before `activate`, and that builds the new version beside the
old one. The files of the active version stay: other servers pull from them, and the next version
may come as changes of them. Those of the version before are written over with the next one's.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from prometheus_client import Histogram

from services.rollout.engine.checks import check_probe
from services.rollout.engine.engine import Engine
from services.rollout.staging import NotArrived, Stager, StagingStopped, check_tensors
from shared.errors import (
    DeadlineExceeded,
    HttpFailed,
    OtherValues,
    RemoteError,
    TandemError,
    WeightsCorrupt,
)
from shared.spans import span
from shared.tasks import end
from shared.telemetry import counter, gauge, histogram
from shared.weights.manifest import INCOMING_FILE, MANIFEST_FILE, delta_file, shard_file
from shared.weights.protocol import (
    BeginUpdate,
    CommitResult,
    CommitUpdate,
    GroupTransfer,
    UpdateState,
    UpdateStatus,
)
from shared.weights.shard_server import Coming, Kind
from shared.weights.stored import StoredVersion

log = structlog.get_logger()

SPARE = "spare"  # folder of the files that the next version takes


class UpdateConflict(TandemError):
    """The request does not fit the state of the transaction (HTTP 409)."""


class UpdateUnknown(TandemError):
    """No update of that version is known (HTTP 404)."""


class CommitFailed(TandemError):
    """The version was refused; the previous one serves (HTTP 500)."""


class NotAsExpected(CommitFailed):
    """Refused for its effective checksum alone, which is not the one expected (HTTP 412)."""


@dataclass(slots=True)
class Update:
    """One transaction in progress or past."""

    request: BeginUpdate
    folder: Path
    stager: Stager
    state: UpdateState = "staging"
    error: str = ""
    is_wrong: bool = False  # what came, as against what did not come
    touched_at_s: float = field(default_factory=time.monotonic)
    staging: asyncio.Task[None] | None = None
    activation: asyncio.Task[CommitResult] | None = None

    @property
    def version(self) -> int:
        return self.request.version

    @property
    def is_open(self) -> bool:
        return self.state in ("staging", "staged", "activating")

    def status(self) -> UpdateStatus:
        progress = self.stager.progress
        return UpdateStatus(
            version=self.version,
            state=self.state,
            staged_bytes=progress.staged_bytes,
            total_bytes=self.request.manifest.num_bytes,
            pulled_bytes=progress.pulled_bytes,
            rebuilt_shards=progress.rebuilt_shards,
            error=self.error,
            is_wrong=self.is_wrong,
        )


class Updates:
    """All updates of one engine; one is open at a time."""

    def __init__(
        self,
        engine: Engine,
        *,
        job_id: str,
        folder: Path,
        deadline_s: float,
        activation_limit_s: float,
        max_bytes: int,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._job_id = job_id
        self._folder = folder
        self._deadline_s = deadline_s
        self._activation_limit_s = activation_limit_s
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._update: Update | None = None
        self._served: CommitResult | None = None  # of the last commit that was not refused

    @property
    def is_activating(self) -> bool:
        return self._update is not None and self._update.state == "activating"

    def begin(self, request: BeginUpdate, *, known_sources: Sequence[str]) -> UpdateStatus:
        """Start staging. The same version again is the same update."""
        current, active = self._update, self._engine.policy_version
        if current is not None and self._is_same(current, request):
            current.touched_at_s = time.monotonic()
            return current.status()
        self._refuse(request, active, known_sources)
        if current is not None and current.is_open:
            if time.monotonic() - current.touched_at_s < self._deadline_s or self.is_activating:
                raise UpdateConflict(
                    f"version {request.version} cannot begin: version {current.version} is "
                    f"{current.state}"
                )
            current.stager.progress.stopped.set()
            self._close(current, "aborted", f"nobody asked for {self._deadline_s:g} s")
        folder = self._path(request.version)
        update = Update(request, folder, self._stager(request, folder))
        update.staging = asyncio.create_task(self._stage(update), name=f"stage {update.version}")
        self._update = update
        self._on_change()
        log.info("update_began", policy_version=update.version, bytes=request.manifest.num_bytes)
        return update.status()

    def status(self, version: int) -> UpdateStatus:
        update = self._of(version)
        update.touched_at_s = time.monotonic()
        return update.status()

    async def commit(self, version: int, commit: CommitUpdate) -> CommitResult:
        """Activate a staged version. A commit that is repeated answers as it did, or as it will.

        An engine that takes a version before it knows the checksum says what it has: whoever
        expected another will say so when it asks again.
        """
        served = self._served
        if served is not None and served.version == version == self._engine.policy_version:
            return self._as_expected(served, commit)
        update = self._of(version)
        if update.activation is None:
            if update.state != "staged":
                reason = f": {update.error}" if update.error else ""
                raise UpdateConflict(f"version {version} is {update.state}{reason}")
            update.state = "activating"
            self._on_change()
            activating = self._activate(update, commit)
            update.activation = asyncio.create_task(activating, name=f"activate {version}")
        return await asyncio.shield(update.activation)

    async def _activate(self, update: Update, commit: CommitUpdate) -> CommitResult:
        before = self._engine.policy_version
        try:
            check_probe(commit.probe, self._engine.spec)
            with span("activate", "updates", policy_version=update.version):
                result = await self._engine.activate(
                    update.folder, commit, timeout_s=self._activation_limit_s
                )
        except (RemoteError, ValueError) as err:
            self._close(update, "failed", str(err))
            is_other = isinstance(err, RemoteError) and err.kind == OtherValues.__name__
            kind = NotAsExpected if is_other else CommitFailed
            raise kind(f"version {update.version} was refused: {err}") from err
        except DeadlineExceeded as err:
            # It may still be applied; what this server serves is no longer known.
            self._close(update, "failed", str(err))
            self._engine.died.set()
            raise CommitFailed(f"version {update.version}: {err}; the engine is restarted") from err
        except BaseException:
            self._close(update, "failed", "the commit was cut short")
            raise
        self._served = result
        self._retire(before)
        self._drop_all_but(update.folder)
        self._close(update, "active", "")
        _observe(result)
        return result

    def _as_expected(self, served: CommitResult, commit: CommitUpdate) -> CommitResult:
        """`NotAsExpected` if it is known by now that what is served is not what was published."""
        expected = commit.effective_checksum
        if expected in (None, served.effective_checksum):
            return served
        self._engine.died.set()  # no other version is left to go back to
        raise NotAsExpected(
            f"version {served.version}: effective checksum {served.effective_checksum}, expected "
            f"was {expected}; the engine is restarted"
        )

    async def rehearse(self, version: int, commit: CommitUpdate) -> CommitResult:
        """Do with the bytes of the active version all that a commit does but switch: load, restore,
        probe. Sampling stands still meanwhile, as in a commit."""
        active, update = self._engine.policy_version, self._update
        if version != active:
            raise UpdateConflict(f"version {version} cannot be rehearsed: {active} is active")
        if update is not None and update.is_open:
            raise UpdateConflict(f"version {update.version} is {update.state}")
        folder = self._path(version)
        if not (folder / MANIFEST_FILE).exists():
            raise UpdateConflict(f"the bytes of version {version} are not kept")
        try:
            check_probe(commit.probe, self._engine.spec)
            return await self._engine.rehearse(folder, commit, timeout_s=self._deadline_s)
        except (RemoteError, ValueError) as err:
            raise CommitFailed(f"version {version} would be refused: {err}") from err

    async def abort(self, version: int) -> UpdateStatus:
        """Give a version up. What is active stays so; what is past stays as it ended."""
        update = self._of(version)
        if update.state == "activating":
            raise UpdateConflict(f"version {version} is being activated")
        if update.is_open:
            await self._end_staging(update)
            self._close(update, "aborted", "aborted by request")
        return update.status()

    def find(self, version: int, kind: Kind, index: int) -> Path | Coming | None:
        """The file of a shard for other servers; called in threads."""
        update = self._update
        name = shard_file(index) if kind == "shards" else delta_file(index)
        if update is not None and update.version == version:
            progress = update.stager.progress
            if (kind, index) in progress.ready:
                return update.folder / name
            if kind == "deltas" and update.request.base_version is None:
                return None  # it comes whole
            come = progress.pulled_bytes + progress.staged_bytes
            return Coming(come) if update.state == "staging" else None
        path = self._path(version) / name
        return path if version == self._engine.policy_version and path.exists() else None

    async def close(self) -> None:
        """Leave only what an unfinished transfer has brought."""
        if self._update is not None:
            await self._end_staging(self._update)
            if self._update.activation is not None:
                await end(self._update.activation)
        whole = [manifest.parent for manifest in self._folder.glob(f"v*/{MANIFEST_FILE}")]
        for folder in (*whole, self._folder / SPARE):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a broken transfer is in it
            self._folder.rmdir()

    async def _end_staging(self, update: Update) -> None:
        update.stager.progress.stopped.set()
        if update.staging is not None:
            await end(update.staging)

    def _stager(self, request: BeginUpdate, folder: Path) -> Stager:
        active = self._engine.policy_version
        base = None if active is None else StoredVersion.open(self._path(active))
        return Stager(
            request, folder, base, deadline_s=self._deadline_s, spare=self._folder / SPARE
        )

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"

    def _is_same(self, update: Update, request: BeginUpdate) -> bool:
        if update.version != request.version or update.state in ("failed", "aborted"):
            return False
        if update.request.manifest.without_delta() != request.manifest.without_delta():
            raise UpdateConflict(f"version {request.version} came before with another manifest")
        return True

    def _refuse(
        self, request: BeginUpdate, active: int | None, known_sources: Sequence[str]
    ) -> None:
        manifest = request.manifest
        for job_id in (request.job_id, manifest.job_id):
            if job_id != self._job_id:
                raise UpdateConflict(f"job {job_id} is not served here, job {self._job_id} is")
        if manifest.policy_version != request.version:
            raise ValueError(
                f"version {request.version} comes with a manifest of {manifest.policy_version}"
            )
        if active is not None and not (request.is_rollback or request.version > active):
            raise UpdateConflict(f"version {request.version} is not above active version {active}")
        if request.version == active:
            raise UpdateConflict(f"version {request.version} is active already")
        if manifest.num_bytes > self._max_bytes:
            raise ValueError(f"{manifest.num_bytes} bytes exceed {self._max_bytes}")
        for source in (*request.sources, *request.owners):
            if source.rstrip("/") not in known_sources:
                raise ValueError(f"source {source} is no registered peer")

    def _of(self, version: int) -> Update:
        if self._update is None or self._update.version != version:
            raise UpdateUnknown(f"no update of version {version} is known")
        return self._update

    def _close(self, update: Update, state: UpdateState, error: str) -> None:
        update.state, update.error = state, error
        counter("rollout_updates_total", "Weight updates.", ("outcome",)).labels(state).inc()
        if error:
            log.warning("update_ended", policy_version=update.version, state=state, error=error)
        self._on_change()

    async def _stage(self, update: Update) -> None:
        """Everything that can be found wrong is found here, while the old version serves."""
        manifest, began_s = update.request.manifest, time.monotonic()
        active = self._engine.policy_version
        try:
            check_tensors(manifest, self._engine.spec.arch)
            self._drop_all_but(update.folder, *([] if active is None else [self._path(active)]))
            update.folder.mkdir(parents=True, exist_ok=True)
            if update.request.group is not None:
                await self._receive(update, update.request.group)
            with span("stage", "updates", policy_version=update.version):
                await asyncio.to_thread(update.stager.bring_all)
            if update.state != "staging":
                return  # it was given up meanwhile
            (update.folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
        except StagingStopped:
            return  # whoever gave it up has said so
        except (WeightsCorrupt, NotArrived, HttpFailed, DeadlineExceeded, OSError) as err:
            update.is_wrong = isinstance(err, WeightsCorrupt)
            self._close(update, "failed", str(err))
            return
        except Exception as err:
            log.exception("staging_broke", policy_version=update.version)
            self._close(update, "failed", repr(err))  # or whoever polls would wait for nobody
            return
        update.state = "staged"
        seconds = time.monotonic() - began_s
        _phases().labels("stage").observe(seconds)
        status = update.status()
        log.info(
            "update_staged",
            policy_version=update.version,
            seconds=seconds,
            pulled_bytes=status.pulled_bytes,
            rebuilt_shards=status.rebuilt_shards,
        )
        self._on_change()

    async def _receive(self, update: Update, group: GroupTransfer) -> None:
        """Whatever a process group brings is verified like the rest, which is pulled."""
        file = update.folder / INCOMING_FILE
        file.write_text(update.request.manifest.without_delta().model_dump_json())
        try:
            await self._engine.receive(update.folder, group)
        except (RemoteError, DeadlineExceeded) as err:
            log.warning("group_failed", policy_version=update.version, error=str(err))
        finally:
            file.unlink(missing_ok=True)

    def _retire(self, version: int | None) -> None:
        """Nobody reads this version's files any more: the next one may take them."""
        spare = self._folder / SPARE
        shutil.rmtree(spare, ignore_errors=True)
        if version is not None and self._path(version).exists():
            self._path(version).rename(spare)

    def _drop_all_but(self, *kept: Path) -> None:
        if self._folder.exists():
            for folder in self._folder.iterdir():
                if folder not in kept and folder.name != SPARE:
                    shutil.rmtree(folder, ignore_errors=True)


def _phases() -> Histogram:
    return histogram("rollout_update_seconds", "Phases of a weight update.", ("phase",))


def _observe(result: CommitResult) -> None:
    seconds = _phases()
    for phase in ("pause", "load", "restore", "probe", "resume"):
        seconds.labels(phase).observe(getattr(result, f"{phase}_s"))
    gauge("rollout_policy_version", "The version that is served.").set(result.version)
    if result.probe_mean_abs_delta is not None:
        drift = gauge("rollout_probe_delta", "Mean |delta log p| of the last probe.")
        drift.set(result.probe_mean_abs_delta)
