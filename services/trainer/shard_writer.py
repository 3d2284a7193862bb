"""Stored tensors into shard files of bounded size, and beside them what changed since a base.

A shard that is full is checksummed and written by a thread while the next one fills. Tensors of a
device are copied into pinned memory, which is taken again for later shards, without waiting.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

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


_WRITERS = 4  # shards on their way to files, each with its bytes in memory


@dataclass(slots=True)
class _OpenShard:
    """Bytes that lie one behind the other."""

    index: int
    blobs: list[memoryview] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)  # their checksums come last
    size: int = 0
    pinned: Tensor | None = None
    copied: torch.cuda.Event | None = None

    def add(self, name: str, tensor: Tensor, *, room: int) -> None:
        blob = self._bytes_from_device(tensor, room) if tensor.is_cuda else raw_bytes(tensor)
        entry = TensorEntry(
            name=name,
            shape=list(tensor.shape),
            dtype=_DTYPES[tensor.dtype],
            shard=self.index,
            offset=self.size,
            num_bytes=len(blob),
            checksum="0" * 32,
        )
        self.entries.append(entry)
        self.blobs.append(blob)
        self.size += len(blob)

    def _bytes_from_device(self, tensor: Tensor, room: int) -> memoryview:
        """Where the bytes will be once `copied` has happened; the shard takes `room` at most."""
        if self.pinned is None:
            self.pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        place = self.pinned[self.size : self.size + flat.numel()]
        place.copy_(flat, non_blocking=True)
        return place.numpy().data

    def close(self) -> None:
        if self.pinned is not None:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()


@dataclass(frozen=True, slots=True)
class _Written:
    shard: ShardEntry
    tensors: list[TensorEntry]
    delta: DeltaShard | None


@dataclass(slots=True)
class ShardWriter:
    """Fills one shard after the other; files are named `prefix` and the shard's number.

    A context: when it is left, all files are whole. OSError if one cannot be written.
    """

    directory: Path
    max_shard_bytes: int
    prefix: str = ""
    base: StoredVersion | None = None
    shards: list[ShardEntry] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    _deltas: list[DeltaShard | None] = field(default_factory=list)
    _open: _OpenShard | None = None
    _num_shards: int = 0
    _pool: ThreadPoolExecutor | None = None
    _writing: list[Future[_Written]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(_WRITERS, "shards")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        assert self._pool is not None
        try:
            if kind is None:
                self._hand_over()
                self._collect(at_most=0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, parts: dict[str, Tensor]) -> None:
        """Tensors that belong together go into one shard."""
        num_bytes = sum(tensor.nbytes for tensor in parts.values())
        if self._open is not None and self._open.size + num_bytes > self.max_shard_bytes:
            self._hand_over()
        if self._open is None:
            self._open, self._num_shards = _OpenShard(self._num_shards), self._num_shards + 1
        for name, tensor in parts.items():
            self._open.add(name, tensor, room=max(num_bytes, self.max_shard_bytes))

    def delta(self) -> Delta | None:
        """None without a base, or if no shard is smaller as changes."""
        if self.base is None or not any(self._deltas):
            return None
        return Delta(base_version=self.base.manifest.policy_version, shards=self._deltas)

    def _hand_over(self) -> None:
        """The open shard to a thread; no more of them are in memory than threads."""
        assert self._pool is not None
        if self._open is None:
            return
        self._open.close()
        self._collect(at_most=_WRITERS - 1)
        self._writing.append(self._pool.submit(self._write_shard, self._open))
        self._open = None

    def _collect(self, *, at_most: int) -> None:
        """Wait until no more than so many shards are being written, in their order."""
        while len(self._writing) > at_most:
            written = self._writing.pop(0).result()
            self.shards.append(written.shard)
            self.tensors += written.tensors
            self._deltas.append(written.delta)

    def _write_shard(self, shard: _OpenShard) -> _Written:
        if shard.copied is not None:
            shard.copied.synchronize()
        pairs = zip(shard.entries, shard.blobs, strict=True)
        entries = [
            entry.model_copy(update={"checksum": xxhash.xxh3_128_hexdigest(blob)})
            for entry, blob in pairs
        ]
        checksum = self._write(shard_file(shard.index), shard.blobs)
        whole = ShardEntry(index=shard.index, num_bytes=shard.size, checksum=checksum)
        delta = None if self.base is None else self._write_delta(shard, entries, self.base)
        return _Written(whole, entries, delta)

    def _write_delta(
        self, shard: _OpenShard, entries: list[TensorEntry], base: StoredVersion
    ) -> DeltaShard | None:
        """None if the changes are nearly as large as the shard."""
        tensors: list[DeltaTensor] = []
        blobs: list[bytes | memoryview] = []
        size = 0
        for entry, blob in zip(entries, shard.blobs, strict=True):
            change = _change(entry, blob, base)
            if change is None:
                continue
            encoding, raw = change
            tensors.append(
                DeltaTensor(name=entry.name, encoding=encoding, offset=size, num_bytes=len(raw))
            )
            blobs.append(raw)
            size += len(raw)
        if size > DEFAULT_MAX_SHARE * shard.size:
            return None
        checksum = self._write(delta_file(shard.index), blobs)
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
