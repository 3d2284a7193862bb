"""A version's files in a folder, and how shards are rebuilt from a base and what changed.

Trainer, store and servers read and rebuild with this one implementation, so the result has the same
bytes everywhere; the manifest's checksums decide.
"""

from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ValidationError

from shared.errors import WeightsCorrupt
from shared.weights.delta import apply_delta
from shared.weights.manifest import MANIFEST_FILE, DeltaTensor, Manifest, TensorEntry, shard_file

Bytes = NDArray[np.uint8]


class StoredVersion:
    """Tensors by name, read through memory maps: only what is looked at is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._shards: dict[int, Bytes] = {}

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """None if the folder does not hold a whole version here."""
        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        except (OSError, ValidationError):
            return None
        return cls(folder, manifest)

    def tensor(self, name: str) -> tuple[TensorEntry, Bytes] | None:
        """None if there is no such tensor, or its shard is not here (it is another node's)."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        shard = self._shard(entry.shard)
        return None if shard is None else (entry, shard[entry.offset :][: entry.num_bytes])

    def _shard(self, index: int) -> Bytes | None:
        if index not in self._shards:
            path = self._folder / shard_file(index)
            num_bytes = self.manifest.shards[index].num_bytes
            if not path.exists() or path.stat().st_size != num_bytes:
                return None
            self._shards[index] = _mapped(path)
        return self._shards[index]


def _mapped(path: Path) -> Bytes:
    if path.stat().st_size == 0:
        return np.zeros(0, np.uint8)
    mapped: Any = np.memmap(path, np.uint8, "r")
    return np.asarray(mapped)


def rebuild_shard(base: StoredVersion, manifest: Manifest, index: int, changes: Bytes) -> Bytes:
    """The bytes of a shard of `manifest`, whose delta is on `base`; `changes` is its delta shard.

    WeightsCorrupt if the base lacks a tensor or has another one, or if the result's checksum is not
    the manifest's.
    """
    assert manifest.delta is not None
    delta = manifest.delta.shards[index]
    assert delta is not None
    shard, result = manifest.shards[index], np.empty(manifest.shards[index].num_bytes, np.uint8)
    changed = {one.name: one for one in delta.tensors}
    for entry in manifest.tensors:
        if entry.shard == index:
            out = result[entry.offset :][: entry.num_bytes]
            _rebuild(entry, changed.get(entry.name), base, changes, out)
    if xxhash.xxh3_128_hexdigest(result.data) != shard.checksum:
        base_version = manifest.delta.base_version
        raise WeightsCorrupt(f"shard {index} on base {base_version}: checksum differs")
    return result


def _rebuild(
    entry: TensorEntry, change: DeltaTensor | None, base: StoredVersion, changes: Bytes, out: Bytes
) -> None:
    raw = None if change is None else changes[change.offset :][: change.num_bytes]
    if change is not None and raw is not None and change.encoding == "full":
        if len(raw) != len(out):
            raise WeightsCorrupt(f"{entry.name}: {len(raw)} bytes for {len(out)}")
        out[:] = raw
        return
    found = base.tensor(entry.name)
    if found is None or (found[0].shape, found[0].dtype) != (entry.shape, entry.dtype):
        raise WeightsCorrupt(f"{entry.name}: the base has no such tensor")
    if raw is None:
        out[:] = found[1]
    else:
        apply_delta(found[1], raw, out=out)
