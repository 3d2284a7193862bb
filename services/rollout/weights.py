"""The update transaction of one server: stage, verify, commit, or leave everything as it was.

     begin ──> staging ──all bytes verified──> staged ──commit──> activating ──> active
                  └── wrong bytes, shapes, dtypes; abort; deadline ──> failed | aborted
                                                                       (the old version serves)

Shards are pulled into files by threads; a pull that broke off goes on where it stopped, from the
next source. Nothing the engine serves is touched before `activate`, and that builds the new version
beside the old one.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import structlog
import xxhash

from services.rollout.engine.engine import Engine
from shared.errors import DeadlineExceeded, HttpFailed, RemoteError, TandemError, WeightsCorrupt
from shared.http import download
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import tensor_specs
from shared.tasks import end
from shared.telemetry import counter, gauge, histogram
from shared.weights.manifest import MANIFEST_FILE, Manifest, ShardEntry, shard_file
from shared.weights.protocol import (
    BeginUpdate,
    CommitResult,
    CommitUpdate,
    UpdateState,
    UpdateStatus,
)

log = structlog.get_logger()

_ATTEMPTS = 2  # of each source for each shard
_SILENCE_S = 10.0  # a source that sends nothing for so long is given up
_CHUNK_BYTES = 2**20


class UpdateConflict(TandemError):
    """The request does not fit the state of the transaction (HTTP 409)."""


class UpdateUnknown(TandemError):
    """No update of that version is known (HTTP 404)."""


class CommitFailed(TandemError):
    """The version was refused; the previous one serves (HTTP 500)."""


@dataclass(slots=True)
class Update:
    """One transaction in progress or past."""

    request: BeginUpdate
    folder: Path
    state: UpdateState = "staging"
    error: str = ""
    staged_bytes: int = 0
    touched_at_s: float = field(default_factory=time.monotonic)
    staging: asyncio.Task[None] | None = None
    result: CommitResult | None = None

    @property
    def version(self) -> int:
        return self.request.version

    @property
    def is_open(self) -> bool:
        return self.state in ("staging", "staged", "activating")

    def status(self) -> UpdateStatus:
        return UpdateStatus(
            version=self.version,
            state=self.state,
            staged_bytes=self.staged_bytes,
            total_bytes=self.request.manifest.num_bytes,
            error=self.error,
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
        max_bytes: int,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._job_id = job_id
        self._folder = folder
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._update: Update | None = None

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
            self._close(current, "aborted", f"nobody asked for {self._deadline_s:g} s")
        update = Update(request, self._folder / f"v{request.version:08d}")
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
        """Activate a staged version; a version that is active already answers as it did."""
        update = self._of(version)
        if update.state == "active" and update.result is not None:
            return update.result
        if update.state != "staged":
            reason = f": {update.error}" if update.error else ""
            raise UpdateConflict(f"version {version} is {update.state}{reason}")
        update.state = "activating"
        self._on_change()
        try:
            result = await self._engine.activate(update.folder, commit, timeout_s=self._deadline_s)
        except (RemoteError, ValueError) as err:
            self._close(update, "failed", str(err))
            raise CommitFailed(f"version {version} was refused: {err}") from err
        except DeadlineExceeded as err:
            # It may still be applied; what this server serves is no longer known.
            self._close(update, "failed", str(err))
            self._engine.died.set()
            raise CommitFailed(f"version {version}: {err}; the engine is restarted") from err
        update.result = result
        self._close(update, "active", "")
        _observe(result)
        return result

    async def abort(self, version: int) -> UpdateStatus:
        """Give a version up. What is active stays so; what is past stays as it ended."""
        update = self._of(version)
        if update.state == "activating":
            raise UpdateConflict(f"version {version} is being activated")
        if update.is_open:
            if update.staging is not None:
                await end(update.staging)
            self._close(update, "aborted", "aborted by request")
        return update.status()

    async def close(self) -> None:
        if self._update is not None and self._update.staging is not None:
            await end(self._update.staging)

    def _is_same(self, update: Update, request: BeginUpdate) -> bool:
        if update.version != request.version or update.state in ("failed", "aborted"):
            return False
        if update.request.manifest != request.manifest:
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
        if active is not None and request.version <= active:
            raise UpdateConflict(f"version {request.version} is not above active version {active}")
        if manifest.num_bytes > self._max_bytes:
            raise ValueError(f"{manifest.num_bytes} bytes exceed {self._max_bytes}")
        for source in request.sources:
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
        if state == "active":
            shutil.rmtree(self._folder, ignore_errors=True)
        self._on_change()

    async def _stage(self, update: Update) -> None:
        """Everything that can be found wrong is found here, while the old version serves."""
        manifest, began_s = update.request.manifest, time.monotonic()
        try:
            check_tensors(manifest, self._engine.spec.arch)
            self._drop_other_versions(update.folder)
            update.folder.mkdir(parents=True, exist_ok=True)
            for shard in manifest.shards:
                await self._pull(update, shard)
            (update.folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
        except (WeightsCorrupt, HttpFailed, OSError) as err:
            self._close(update, "failed", str(err))
            return
        update.state, update.staged_bytes = "staged", manifest.num_bytes
        seconds = time.monotonic() - began_s
        histogram("rollout_update_seconds", "Phases of a weight update.", ("phase",)).labels(
            "stage"
        ).observe(seconds)
        log.info("update_staged", policy_version=update.version, seconds=seconds)
        self._on_change()

    async def _pull(self, update: Update, shard: ShardEntry) -> None:
        """One shard from the first source that has it whole; WeightsCorrupt if none has."""
        target = update.folder / shard_file(shard.index)
        before, failures = update.staged_bytes, []
        for source in list(update.request.sources) * _ATTEMPTS:
            url = f"{source.rstrip('/')}/v1/weights/{update.version}/shards/{shard.index}"
            watching = asyncio.create_task(_follow_size(update, target, before))
            try:
                await asyncio.to_thread(fetch_shard, url, target, shard, update.request.manifest)
            except (HttpFailed, WeightsCorrupt) as err:
                failures.append(str(err))
                log.warning("shard_refused", shard=shard.index, source=source, error=str(err))
            else:
                update.staged_bytes = before + shard.num_bytes
                return
            finally:
                await end(watching)
        raise WeightsCorrupt("; ".join(dict.fromkeys(failures)))

    def _drop_other_versions(self, keep: Path) -> None:
        if self._folder.exists():
            for folder in self._folder.iterdir():
                if folder != keep:
                    shutil.rmtree(folder, ignore_errors=True)


def check_tensors(manifest: Manifest, arch: Architecture) -> None:
    """WeightsCorrupt unless names, shapes and dtypes are those of the architecture."""
    specs = tensor_specs(arch)
    found = {entry.name: entry for entry in manifest.tensors}
    for name, spec in specs.items():
        entry = found.get(name)
        if entry is None:
            raise WeightsCorrupt(f"{name}: expected {spec.dtype}{list(spec.shape)}, found none")
        if entry.dtype != spec.dtype or tuple(entry.shape) != spec.shape:
            expected = f"{spec.dtype}{list(spec.shape)}"
            raise WeightsCorrupt(f"{name}: expected {expected}, found {entry.dtype}{entry.shape}")
    for name in found:
        if name not in specs:
            raise WeightsCorrupt(f"{name}: the architecture has no such tensor")


def fetch_shard(url: str, target: Path, shard: ShardEntry, manifest: Manifest) -> None:
    """Bring a shard into its file and verify it, resuming what is there already (blocking).

    Raises HttpFailed with the partial file kept, or WeightsCorrupt naming the first tensor whose
    bytes are wrong, with the file removed.
    """
    offset = target.stat().st_size if target.exists() else 0
    if offset > shard.num_bytes:
        target.unlink()
        offset = 0
    if offset < shard.num_bytes:
        checksum = download(
            url, target, expected_bytes=shard.num_bytes, offset=offset, timeout_s=_SILENCE_S
        ).xxh3_128
    else:
        target.touch()
        checksum = _file_checksum(target)
    wrong = _first_wrong_tensor(target, shard, manifest)
    if checksum == shard.checksum and wrong is None:
        return
    target.unlink()
    what = f"checksum of {wrong} differs" if wrong else "checksum differs"
    raise WeightsCorrupt(f"shard {shard.index} from {url}: {what}")


def _first_wrong_tensor(target: Path, shard: ShardEntry, manifest: Manifest) -> str | None:
    with target.open("rb") as file:
        for entry in manifest.tensors:
            if entry.shard != shard.index:
                continue
            file.seek(entry.offset)
            if _checksum(file, entry.num_bytes) != entry.checksum:
                return entry.name
    return None


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return _checksum(file, path.stat().st_size)


def _checksum(file: BinaryIO, num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    while num_bytes > 0 and (chunk := file.read(min(_CHUNK_BYTES, num_bytes))):
        digest.update(chunk)
        num_bytes -= len(chunk)
    return digest.hexdigest()


async def _follow_size(update: Update, target: Path, before: int) -> None:
    """Keep the progress up to date while a thread writes the file."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            update.staged_bytes = before + os.stat(target).st_size  # noqa: PTH116  does not wait
        await asyncio.sleep(0.1)


def _observe(result: CommitResult) -> None:
    seconds = histogram("rollout_update_seconds", "Phases of a weight update.", ("phase",))
    for phase in ("pause", "load", "restore", "probe", "resume"):
        seconds.labels(phase).observe(getattr(result, f"{phase}_s"))
    gauge("rollout_policy_version", "The version that is served.").set(result.version)
    if result.probe_mean_abs_delta is not None:
        drift = gauge("rollout_probe_delta", "Mean |delta log p| of the last probe.")
        drift.set(result.probe_mean_abs_delta)
