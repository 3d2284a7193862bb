"""Stored tensors into shard files of bounded size, and beside them what changed since a base."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

from shared.weights.delta import DEFAULT_MAX_SHARE, encode_delta
from shared.weights.manifest import (
    BYTES_PER_ITEM,
    Delta,
    DeltaShard,
    DeltaTensor,
    DType,
    ShardEntry,
    TensorEntry,
    delta_file,
    shard_file,
)
from shared.weights.stored import StoredVersion

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int64: "I64",
}


@dataclass(slots=True)
class ShardWriter:
    """Fills one shard after the other; files are named `prefix` and the shard's number."""

    directory: Path
    max_shard_bytes: int
    prefix: str = ""
    base: StoredVersion | None = None
    shards: list[ShardEntry] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    _deltas: list[DeltaShard | None] = field(default_factory=list)
    _blobs: list[memoryview] = field(default_factory=list)  # of the shard that is open
    _entries: list[TensorEntry] = field(default_factory=list)
    _size: int = 0

    def add(self, parts: dict[str, Tensor]) -> None:
        """Tensors that belong together go into one shard."""
        blobs = {name: raw_bytes(tensor) for name, tensor in parts.items()}
        if self._blobs and self._size + sum(map(len, blobs.values())) > self.max_shard_bytes:
            self.close_shard()
        for name, blob in blobs.items():
            tensor = parts[name]
            self._entries.append(
                TensorEntry(
                    name=name,
                    shape=list(tensor.shape),
                    dtype=_DTYPES[tensor.dtype],
                    shard=len(self.shards),
                    offset=self._size,
                    num_bytes=len(blob),
                    checksum=xxhash.xxh3_128_hexdigest(blob),
                )
            )
            self._blobs.append(blob)
            self._size += len(blob)

    def close_shard(self) -> None:
        if not self._blobs:
            return
        index = len(self.shards)
        checksum = self._write(shard_file(index), self._blobs)
        self.shards.append(ShardEntry(index=index, num_bytes=self._size, checksum=checksum))
        self._deltas.append(None if self.base is None else self._write_delta(index, self.base))
        self.tensors += self._entries
        self._blobs, self._entries, self._size = [], [], 0

    def delta(self) -> Delta | None:
        """None without a base, or if no shard is smaller as changes."""
        if self.base is None or not any(self._deltas):
            return None
        return Delta(base_version=self.base.manifest.policy_version, shards=self._deltas)

    def _write_delta(self, index: int, base: StoredVersion) -> DeltaShard | None:
        """None if the changes are nearly as large as the shard."""
        tensors: list[DeltaTensor] = []
        blobs: list[bytes | memoryview] = []
        size = 0
        for entry, blob in zip(self._entries, self._blobs, strict=True):
            change = _change(entry, blob, base)
            if change is None:
                continue
            encoding, raw = change
            tensors.append(
                DeltaTensor(name=entry.name, encoding=encoding, offset=size, num_bytes=len(raw))
            )
            blobs.append(raw)
            size += len(raw)
        if size > DEFAULT_MAX_SHARE * self._size:
            return None
        checksum = self._write(delta_file(index), blobs)
        return DeltaShard(num_bytes=size, checksum=checksum, tensors=tensors)

    def _write(self, name: str, blobs: list[memoryview] | list[bytes | memoryview]) -> str:
        """Their checksum."""
        digest = xxhash.xxh3_128()
        for blob in blobs:
            digest.update(blob)
        path = self.directory / f"{self.prefix}{name}"
        write_file(path.with_suffix(".tmp"), path, blobs)
        return digest.hexdigest()


def _change(
    entry: TensorEntry, blob: memoryview, base: StoredVersion
) -> tuple[Literal["delta", "full"], bytes | memoryview] | None:
    """None if the tensor is the base's."""
    found = base.tensor(entry.name)
    if found is None or (found[0].shape, found[0].dtype) != (entry.shape, entry.dtype):
        return "full", blob
    if found[0].checksum == entry.checksum:
        return None
    raw = encode_delta(found[1].data, blob, item_bytes=BYTES_PER_ITEM[entry.dtype])
    return ("full", blob) if raw is None else ("delta", raw)


def write_file(temporary: Path, path: Path, blobs: Sequence[bytes | memoryview]) -> None:
    """Durably, and whole or not at all."""
    with temporary.open("wb") as file:
        for blob in blobs:
            file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def raw_bytes(tensor: Tensor) -> memoryview:
    """C-order little-endian bytes; numpy knows neither BF16 nor FP8, so the view is of bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
