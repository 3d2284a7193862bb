"""The published versions of one run, as directories; one without a manifest is unfinished.

weights/v00000003/{shard-00000.bin, ..., manifest.json}   written by the ranks, manifest last
                  {delta-00000.bin, ...}                  what changed since the version before
                  probe.json, effective.txt               beside it, written by the conductor
                  published.txt                           what settled a disagreement of servers
                  changes_only                            its shards are gone: rebuild them first

The last versions can be served again. Those that nobody needs now are kept as changes alone, at
most MAX_CHAIN of them on one whole version; what a kept version is rebuilt from is kept with it.
"""

import asyncio
import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.trainer.disk import writing
from shared.errors import WeightsCorrupt
from shared.weights.kept import CHANGES_ONLY, VersionFolders
from shared.weights.manifest import MANIFEST_FILE, Manifest, delta_file, shard_file
from shared.weights.protocol import Probe
from shared.weights.shard_server import Kind

PROBE_FILE = "probe.json"
EFFECTIVE_FILE = "effective.txt"
PUBLISHED_FILE = "published.txt"
MAX_CHAIN = 8


@dataclass(frozen=True, slots=True)
class StoredSize:
    """One version as it lies there."""

    policy_version: int
    is_whole: bool
    stored_bytes: int
    base_version: int | None  # of its changes
    effective_checksum: str | None  # None before a server has served it, or it was settled


class VersionStore(VersionFolders):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "weights")
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # of what changes a finished version
        self._tidied: object = None
        self._lent: Counter[int] = Counter()

    def fresh_path(self, version: int) -> Path:
        """Where to export `version`; what an interrupted export left there is removed."""
        path = self.path(version)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        self._bases.pop(version, None)
        return path

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for an export that is only looked at."""
        path = self._root / "scratch"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def same_weights(self, version: int, path: Path) -> bool:
        """Whether an export in `path` holds the same bytes as `version`, tensor by tensor."""
        published = self.manifest(version)
        other = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
        return published is not None and _checksums(published) == _checksums(other)

    def newest_whole(self) -> int | None:
        """What the next version's changes are made against."""
        return max((one for one in self.versions() if self.is_whole(one)), default=None)

    def file(self, version: int, kind: Kind, index: int) -> Path | None:
        """A file of a finished version."""
        name = shard_file(index) if kind == "shards" else delta_file(index)
        path = self.path(version) / name
        finished = (self.path(version) / MANIFEST_FILE).exists()
        return path if finished and path.exists() else None

    def keep_probe(self, version: int, probe: Probe) -> None:
        self._keep(version, PROBE_FILE, probe.model_dump_json())

    def probe(self, version: int) -> Probe | None:
        path = self.path(version) / PROBE_FILE
        return Probe.model_validate_json(path.read_bytes()) if path.exists() else None

    def keep_effective(self, version: int, checksum: str) -> None:
        """What the first server that serves it says that it computes with."""
        self._keep(version, EFFECTIVE_FILE, checksum)

    def effective(self, version: int) -> str | None:
        """None as long as no server has come to it: one that said otherwise than was settled
        later never served the version."""
        noted, settled = self._kept_text(version, EFFECTIVE_FILE), self.settled(version)
        return noted if settled in (None, noted) else None

    def settle(self, version: int, checksum: str) -> None:
        """The ranks' own word, of what they published."""
        self._keep(version, PUBLISHED_FILE, checksum)

    def settled(self, version: int) -> str | None:
        return self._kept_text(version, PUBLISHED_FILE)

    def expected(self, version: int) -> str | None:
        """What a server has to come to, as far as it is known."""
        return self.settled(version) or self.effective(version)

    def describe(self) -> list[StoredSize]:
        """Every version that can be served, oldest first."""
        return [
            StoredSize(v, self.is_whole(v), self._bytes(v), self._base(v), self.expected(v))
            for v in self.versions()
        ]

    def restore(self, version: int) -> None:
        """Have the shards of a finished version again.

        WeightsCorrupt if they come out otherwise, or names the file that is missing; `Unwritable`
        if the disk has no room for them.

        Blocking: reads the whole version that it is based on, and all changes since.
        """
        with self._lock:
            self.check(version)
            chain = self.chain(version)
            for one in reversed(chain):
                try:
                    with writing(self.path(one)):
                        self._rebuild(one)
                except OSError as err:
                    raise WeightsCorrupt(f"version {one} cannot be rebuilt: {err}") from err
            for one in chain:
                if one != version and one not in self._lent:
                    self._keep_changes_only(one)
            (self.path(version) / CHANGES_ONLY).unlink(missing_ok=True)

    def lend(self, versions: Iterable[int]) -> dict[int, Path]:
        """The versions' directories, whole until `take_back` is called with the same versions.

        Raises what `restore` raises, and then nothing is lent. Blocking, as that is.
        """
        lent = set(versions)
        with self._lock:
            self._lent.update(lent)  # from here on `tidy` leaves them
        try:
            for version in sorted(lent):
                if not self.is_whole(version):
                    self.restore(version)
        except BaseException:
            self.take_back(lent)
            raise
        return {version: self.path(version) for version in lent}

    @contextlib.asynccontextmanager
    async def lending(self, versions: Iterable[int]) -> AsyncIterator[dict[int, Path]]:
        """`lend`, in a thread, and `take_back`: also where nobody waits for the thread any more."""
        task = asyncio.create_task(asyncio.to_thread(self.lend, versions))
        try:
            lent = await asyncio.shield(task)
        except asyncio.CancelledError:  # the thread goes on, and lends
            task.add_done_callback(self._take_back_of)
            raise
        try:
            yield lent
        finally:
            self.take_back(lent)

    def _take_back_of(self, task: asyncio.Task[dict[int, Path]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.take_back(task.result())

    def take_back(self, versions: Iterable[int]) -> None:
        with self._lock:
            self._lent -= Counter(set(versions))
            self._tidied = None

    def can_be_had(self, version: int) -> bool:
        """Whether nothing that the version is made of is missing."""
        try:
            self.check(version)
        except WeightsCorrupt:
            return False
        return True

    def tidy(self, needed: Iterable[int], *, keep_last: int, keep_bytes: int) -> list[int]:
        """Keep the newest versions small and within their bytes; which were deleted.

        Those in `needed` stay whole whatever they take.
        """
        with self._lock:
            versions, whole = self.versions(), frozenset({*needed, *self._lent})
            if self._tidied == (versions, whole):
                return []
            self._shrink(versions, whole)
            kept = self._kept(versions, whole, keep_last, keep_bytes)
            gone = [one for one in versions if one not in kept]
            for one in gone:
                (self.path(one) / MANIFEST_FILE).unlink()  # first: it is not offered any more
                shutil.rmtree(self.path(one))
                self._bases.pop(one, None)
            self._tidied = ([one for one in versions if one not in gone], whole)
            return gone

    def _shrink(self, versions: list[int], needed: frozenset[int]) -> None:
        depth: dict[int, int] = {}
        for one in versions:
            base = self._base(one)
            below = depth.get(base, MAX_CHAIN) if base is not None else MAX_CHAIN
            if one in needed or one == versions[-1] or (below >= MAX_CHAIN and self.is_whole(one)):
                depth[one] = 0
            else:
                depth[one] = below + 1
                self._keep_changes_only(one)

    def _kept(
        self, versions: list[int], needed: frozenset[int], keep_last: int, keep_bytes: int
    ) -> set[int]:
        sizes = {one: self._bytes(one) for one in versions}
        window = versions[-keep_last:]
        while True:
            kept: set[int] = set()
            for one in {*window, *needed} & {*versions}:
                kept |= {one, *self._foundation(one)}
            spare = [one for one in window if one not in needed and one != versions[-1]]
            if not spare or sum(sizes[one] for one in kept) <= keep_bytes:
                return kept
            window = [one for one in window if one != spare[0]]

    def _foundation(self, version: int) -> list[int]:
        """What the version is rebuilt from, itself included; whoever asks for one that cannot be
        rebuilt is told."""
        try:
            return self.made_of(version)
        except WeightsCorrupt:
            return []

    def _rebuild(self, version: int) -> None:
        manifest, path = self.manifest(version), self.path(version)
        assert manifest is not None  # it was checked
        targets = [path / shard_file(index) for index in range(len(manifest.shards))]
        gone = [index for index, target in enumerate(targets) if not target.exists()]
        for index, shard in self._rebuilt(manifest, gone, self._root):
            scratch = targets[index].with_suffix(".tmp")
            scratch.write_bytes(shard.data)  # numpy's own `tofile` does not say that a disk is full
            scratch.rename(targets[index])

    def _keep_changes_only(self, version: int) -> None:
        path = self.path(version)
        (path / CHANGES_ONLY).touch()
        for changes in path.glob("delta-*.bin"):
            (path / changes.name.replace("delta-", "shard-")).unlink(missing_ok=True)

    def _bytes(self, version: int) -> int:
        """Others write and delete meanwhile: a file that is listed may be gone."""
        num_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            for file in self.path(version).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    num_bytes += file.stat().st_size
        return num_bytes

    def _kept_text(self, version: int, name: str) -> str | None:
        path = self.path(version) / name
        return path.read_text() if path.exists() else None

    def _keep(self, version: int, name: str, text: str) -> None:
        path = self.path(version) / name
        scratch = path.with_suffix(".tmp")
        with writing(path):
            scratch.write_text(text)
            scratch.replace(path)


def restore_version(folder: Path) -> None:
    """Have the shards of `RUN/weights/vN` again; WeightsCorrupt if they cannot be had."""
    VersionStore(folder.resolve().parent.parent).restore(int(folder.name.removeprefix("v")))


def _checksums(manifest: Manifest) -> dict[str, str]:
    return {tensor.name: tensor.checksum for tensor in manifest.tensors}
