"""The bytes of a version into a folder: pulled from peers, or rebuilt from a base, and verified.

Each shard by itself: whole already ──> kept; base and delta at hand ──> pulled as changes, rebuilt,
verified; anything else, or a result with another checksum ──> pulled whole. A pull that broke off
goes on where it stopped, at the next source. A source that is sent the file itself is waited for as
long as it gets on. Files of the version before the last are written over: pages that are there cost
a third of new ones. Blocking code for threads.
"""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import numpy as np
import structlog
import xxhash

from shared.errors import DeadlineExceeded, HttpFailed, TandemError, WeightsCorrupt
from shared.http import download
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import tensor_specs
from shared.weights.manifest import Manifest, ShardEntry, delta_file, shard_file
from shared.weights.protocol import BeginUpdate
from shared.weights.shard_server import Kind
from shared.weights.stored import StoredVersion, rebuild_shard

log = structlog.get_logger()

_PULLS = 3  # at the same time: writing fresh pages takes longer than the network
_ATTEMPTS = 2  # of each source for each file
SILENCE_S = 10.0  # a source that sends nothing, or gets nothing, for so long is given up
_COMING_S = 0.02  # pause before a peer is asked again for what is on its way to it
_CHUNK_BYTES = 2**20
_NOT_YET = 503


@dataclass(slots=True)
class Progress:
    """What has arrived; `ready` may be passed on to others."""

    staged_bytes: int = 0  # of shards that are whole
    pulled_bytes: int = 0
    rebuilt_shards: int = 0
    ready: set[tuple[Kind, int]] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)


class NotArrived(TandemError):
    """Some source could not be asked; nothing is known against the version."""


class StagingStopped(TandemError):
    """Nobody wants these bytes any more."""


class Stager:
    """Brings one version into `folder`; `base` is a version that is there whole, or None.

    Files in `spare` are nobody's any more, and are taken for those of their name.
    """

    def __init__(
        self,
        request: BeginUpdate,
        folder: Path,
        base: StoredVersion | None,
        *,
        deadline_s: float,
        spare: Path | None = None,
    ) -> None:
        self.progress = Progress()
        self._deadline_s = deadline_s
        self._ends_s = time.monotonic() + deadline_s
        self._request = request
        self._manifest = request.manifest
        self._folder = folder
        self._spare = spare
        self._base = _usable(base, request)
        self._failed: Counter[tuple[Kind, str]] = Counter()  # sources, how often
        self._lock = threading.Lock()

    def bring_all(self) -> None:
        """Have every shard's file in the folder, verified.

        WeightsCorrupt if no source has one; DeadlineExceeded says for which one it was waited.
        """
        with ThreadPoolExecutor(_PULLS, "pull") as pulling:
            started = [pulling.submit(self._bring, shard) for shard in self._manifest.shards]
            try:
                for one in started:
                    one.result()
            except BaseException:
                self.progress.stopped.set()
                pulling.shutdown(cancel_futures=True)
                raise

    def _bring(self, shard: ShardEntry) -> None:
        target = self._folder / shard_file(shard.index)
        is_here = target.exists() and not _mark(target).exists()
        is_right = is_here and _file_checksum(target) == shard.checksum
        if not is_right and not self._rebuilt(shard, target):
            self._pull("shards", shard, target, shard.num_bytes, shard.checksum)
        with self._lock:
            self.progress.staged_bytes += shard.num_bytes
            self.progress.ready.add(("shards", shard.index))

    def _rebuilt(self, shard: ShardEntry, target: Path) -> bool:
        """Whether the shard could be made of the base and what changed."""
        delta = self._manifest.delta
        changes = None if delta is None else delta.shards[shard.index]
        if self._base is None or changes is None or target.exists():
            return False
        file = self._folder / delta_file(shard.index)
        try:
            self._pull("deltas", shard, file, changes.num_bytes, changes.checksum)
            raw = np.fromfile(file, np.uint8)
            rebuilt = rebuild_shard(self._base, self._manifest, shard.index, raw)
        except (WeightsCorrupt, NotArrived) as err:
            for one in (file, _mark(file)):
                one.unlink(missing_ok=True)
            log.warning("delta_refused", shard=shard.index, error=str(err))
            return False
        self._check_wanted()
        scratch = target.with_suffix(".tmp")
        self._take_spare(target.name, scratch)
        _write_over(scratch, rebuilt)
        scratch.rename(target)
        with self._lock:
            self.progress.rebuilt_shards += 1
            self.progress.ready.add(("deltas", shard.index))
        return True

    def _pull(
        self, kind: Kind, shard: ShardEntry, target: Path, num_bytes: int, checksum: str
    ) -> None:
        """A file from the first source that has it right. One that failed is asked last."""
        failures: list[HttpFailed | WeightsCorrupt] = []
        for source in self._sources(kind, shard) * _ATTEMPTS:
            self._check_wanted()
            url = f"{source.rstrip('/')}/v1/weights/{self._request.version}/{kind}/{shard.index}"
            try:
                found = self._fetch(url, target, num_bytes)
                self._check_wanted()
                if found != checksum:
                    raise _wrong_bytes(kind, url, target, shard, self._manifest)
            except (HttpFailed, WeightsCorrupt) as err:
                failures.append(err)
                with self._lock:
                    self._failed[kind, source] += 1
                log.warning("shard_refused", kind=kind, shard=shard.index, url=url, error=str(err))
            else:
                return
        said = "; ".join(dict.fromkeys(map(str, failures)))
        if any(isinstance(err, HttpFailed) for err in failures):
            raise NotArrived(said)  # who could not be reached may have it right
        raise WeightsCorrupt(said)

    def _sources(self, kind: Kind, shard: ShardEntry) -> list[str]:
        owner = self._request.owners[shard.part : shard.part + 1]
        return sorted([*self._request.sources, *owner], key=lambda one: self._failed[kind, one])

    def _fetch(self, url: str, target: Path, num_bytes: int) -> str:
        """The checksum of the file; resumes, and waits while the source itself is sent it."""
        waiting = _Waiting(url, self._deadline_s, self._ends_s)
        self._take_spare(target.name, target)
        while True:
            try:
                return self._go_on(url, target, num_bytes)
            except HttpFailed as err:
                if err.status != _NOT_YET:
                    raise
                waiting.check(err.body)
                if self.progress.stopped.wait(_COMING_S):
                    raise

    def _go_on(self, url: str, target: Path, num_bytes: int) -> str:
        """Bytes from where the file's mark is; there is no mark once all are there."""
        mark = _mark(target)
        with mark.open("r+b" if mark.exists() else "w+b", buffering=0) as noted:
            offset = int.from_bytes(noted.read(8), "little")
            if offset >= num_bytes:  # all had come, or it is empty
                with target.open("ab") as file:
                    file.truncate(num_bytes)
                checksum = _file_checksum(target)
            else:
                checksum = self._download(url, target, num_bytes, offset, noted)
        self._check_wanted()
        mark.unlink(missing_ok=True)
        return checksum

    def _download(
        self, url: str, target: Path, num_bytes: int, offset: int, noted: RawIOBase
    ) -> str:
        last = offset

        def arrived(at: int) -> None:
            nonlocal last
            with self._lock:
                self.progress.pulled_bytes += at - last
            last = at
            noted.seek(0)
            noted.write(at.to_bytes(8, "little"))

        return download(
            url,
            target,
            expected_bytes=num_bytes,
            offset=offset,
            timeout_s=SILENCE_S,
            stopped=self.progress.stopped,
            arrived=arrived,
        ).xxh3_128

    def _take_spare(self, name: str, target: Path) -> None:
        if self._spare is not None and not target.exists():
            with contextlib.suppress(FileNotFoundError):
                (self._spare / name).rename(target)

    def _check_wanted(self) -> None:
        """A thread outlives its update while a source is slow; the files may be the next one's."""
        if self.progress.stopped.is_set():
            raise StagingStopped(f"version {self._request.version} is not staged any more")


class _Waiting:
    """For a source that says "not yet": any other answer than before is progress."""

    def __init__(self, url: str, deadline_s: float, ends_s: float) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._ends_s = ends_s
        self._answer = ""
        self._since_s = time.monotonic()

    def check(self, answer: str) -> None:
        """HttpFailed once it stands still, DeadlineExceeded once there is no time left."""
        now = time.monotonic()
        if now > self._ends_s:
            raise DeadlineExceeded(f"{self._url} ({answer})", self._deadline_s)
        if answer != self._answer:
            self._answer, self._since_s = answer, now
        elif now > self._since_s + SILENCE_S:
            body = f"waited {SILENCE_S:g} s without progress: {answer}"
            raise HttpFailed("GET", self._url, _NOT_YET, body)


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


def _usable(base: StoredVersion | None, request: BeginUpdate) -> StoredVersion | None:
    """The base, if the manifest's changes are against it and the trainer says so."""
    delta = request.manifest.delta
    if base is None or delta is None or delta.base_version != request.base_version:
        return None
    named = (base.manifest.job_id, base.manifest.policy_version)
    return base if named == (request.job_id, delta.base_version) else None


def _wrong_bytes(
    kind: Kind, url: str, target: Path, shard: ShardEntry, manifest: Manifest
) -> WeightsCorrupt:
    """Names the first tensor whose bytes are wrong; the file is to be written anew."""
    wrong = _first_wrong_tensor(target, shard, manifest) if kind == "shards" else None
    _mark(target).write_bytes(bytes(8))
    what = f"checksum of {wrong} differs" if wrong else "checksum differs"
    return WeightsCorrupt(f"{kind.removesuffix('s')} {shard.index} from {url}: {what}")


def _first_wrong_tensor(target: Path, shard: ShardEntry, manifest: Manifest) -> str | None:
    with target.open("rb") as file:
        for entry in manifest.tensors:
            if entry.shard != shard.index:
                continue
            file.seek(entry.offset)
            if _checksum(file, entry.num_bytes) != entry.checksum:
                return entry.name
    return None


def _mark(target: Path) -> Path:
    """How many bytes of a file are right, 8 of them little-endian, as long as that is not all."""
    return target.with_suffix(".at")


def _write_over(path: Path, data: np.ndarray) -> None:
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        view = data.data
        while view:
            view = view[file.write(view) :]
        file.truncate(len(data))


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return _checksum(file, path.stat().st_size)


def _checksum(file: BinaryIO, num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    while num_bytes > 0 and (chunk := file.read(min(_CHUNK_BYTES, num_bytes))):
        digest.update(chunk)
        num_bytes -= len(chunk)
    return digest.hexdigest()
