"""The versions that a run keeps, for whoever reads them; nothing of the run is changed here.

weights/v00000003/{shard-00000.bin, ..., manifest.json}   a version; its manifest is written last
                  {delta-00000.bin, ...}                  what changed since the version before
                  changes_only                            its shards are gone: rebuild them first
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import structlog
from pydantic import ValidationError

from shared.errors import WeightsCorrupt
from shared.weights.manifest import MANIFEST_FILE, Manifest, delta_file, shard_file
from shared.weights.stored import Bytes, StoredVersion, rebuild_shard

log = structlog.get_logger()

CHANGES_ONLY = "changes_only"


class VersionFolders:
    """The folders `v<version>` in `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bases: dict[int, int | None] = {}

    def path(self, version: int) -> Path:
        return self._root / f"v{version:08d}"

    def versions(self) -> list[int]:
        """Finished versions, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self._root.glob(f"v*/{MANIFEST_FILE}"))

    def manifest(self, version: int) -> Manifest | None:
        """None for a version that is unfinished or gone, or whose manifest cannot be read."""
        path = self.path(version) / MANIFEST_FILE
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as err:
            log.warning("manifest_unreadable", path=str(path), error=err.errors()[0]["msg"])
            return None

    def is_whole(self, version: int) -> bool:
        """Whether its shards can be pulled as they are."""
        path = self.path(version)
        return (path / MANIFEST_FILE).exists() and not (path / CHANGES_ONLY).exists()

    def check(self, version: int) -> None:
        """WeightsCorrupt names what is missing of the version, and the versions that are whole."""
        try:
            missing = [self._missing(one) for one in self.made_of(version)]
            found = next((one for one in missing if one), None)
        except WeightsCorrupt as err:
            raise WeightsCorrupt(f"{err}; {self._sound()}") from err
        if found:
            raise WeightsCorrupt(f"version {version} cannot be had: {found}; {self._sound()}")

    def made_of(self, version: int) -> list[int]:
        """The version and what it is rebuilt from, the whole one last."""
        chain = self.chain(version)
        base = self._base(chain[-1]) if chain else version
        return chain if base is None else [*chain, base]

    def chain(self, version: int) -> list[int]:
        """Versions to rebuild for `version`, itself first; none if it is whole."""
        chain: list[int] = []
        at: int | None = version
        while at is not None and not self.is_whole(at):
            if not (self.path(at) / MANIFEST_FILE).exists():
                built = "" if at == version else f"built on version {at}, which is "
                raise WeightsCorrupt(f"version {version} is {built}gone")
            chain.append(at)
            at = self._base(at)
        return chain

    def copy_whole(self, version: int, scratch: Path) -> Path:
        """A folder in `scratch` with all shards of the version, rebuilt there if need be.

        What the run deletes meanwhile stays in the copy: shards that are there are linked, where
        that can be. WeightsCorrupt as `check` raises it, or if the bytes come out otherwise.

        Blocking: reads the whole version that it is based on, and all changes since.
        """
        self.check(version)
        folders = [self._copy(one, scratch) for one in reversed(self.made_of(version))]
        for folder in folders[:-1]:
            shutil.rmtree(folder)
        return folders[-1]

    def _copy(self, version: int, scratch: Path) -> Path:
        path, manifest = self.path(version), self.manifest(version)
        if manifest is None:
            raise WeightsCorrupt(f"version {version} is gone")
        folder = scratch / path.name
        folder.mkdir(parents=True)
        gone = []
        for index in range(len(manifest.shards)):
            try:
                _link(path / shard_file(index), folder / shard_file(index))
            except FileNotFoundError:
                gone.append(index)
        for index, shard in self._rebuilt(manifest, gone, scratch):
            # numpy's own `tofile` does not say that a disk is full
            (folder / shard_file(index)).write_bytes(shard.data)
        shutil.copyfile(path / MANIFEST_FILE, folder / MANIFEST_FILE)
        return folder

    def _rebuilt(
        self, manifest: Manifest, indices: Sequence[int], root: Path
    ) -> Iterator[tuple[int, Bytes]]:
        """Those shards, from the run's changes and the base version's folder in `root`."""
        if not indices:
            return
        version = manifest.policy_version
        if manifest.delta is None:
            raise WeightsCorrupt(f"version {version}: there are neither shards nor changes of it")
        base = StoredVersion.open(root / self.path(manifest.delta.base_version).name)
        if base is None:
            raise WeightsCorrupt(f"version {version}: its base is gone")
        for index in indices:
            changes = np.fromfile(self.path(version) / delta_file(index), np.uint8)
            yield index, rebuild_shard(base, manifest, index, changes)

    def _missing(self, version: int) -> str | None:
        """The first file that is not there or cannot be read, in words."""
        manifest, path = self.manifest(version), self.path(version)
        if manifest is None:
            return f"{path / MANIFEST_FILE} is unreadable"
        is_whole = self.is_whole(version)
        for index in range(len(manifest.shards)):
            shard, changes = path / shard_file(index), path / delta_file(index)
            if not shard.exists() and (is_whole or not changes.exists()):
                return f"{shard if is_whole else changes} is missing"
        return None

    def _sound(self) -> str:
        whole = [one for one in self.versions() if self.is_whole(one) and not self._missing(one)]
        return f"whole versions: {', '.join(map(str, whole)) or 'none'}"

    def _base(self, version: int) -> int | None:
        if version not in self._bases:
            manifest = self.manifest(version)
            delta = None if manifest is None else manifest.delta
            self._bases[version] = None if delta is None else delta.base_version
        return self._bases[version]


def _link(source: Path, target: Path) -> None:
    """The same bytes at `target`: copied where no link can be made, as on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
