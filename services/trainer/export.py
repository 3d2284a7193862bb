"""The actor's weights as one published version: release names, release formats, checksummed shards.

Tensors are quantised here, once, with the code that loaders and converters use. Shards are written
under temporary names, the manifest last: a version without one is unfinished.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.models.deepseek_v4.checkpoint import quantise_tensor
from shared.quant.policy import Policy
from shared.weights.manifest import (
    MANIFEST_FILE,
    DType,
    Manifest,
    ShardEntry,
    TensorEntry,
    shard_file,
)

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int64: "I64",
}


def export_version(
    model: nn.Module,
    directory: Path,
    *,
    job_id: str,
    policy_version: int,
    policy: Policy,
    max_shard_bytes: int,
) -> Manifest:
    """Write this rank's tensors and the manifest into `directory`, which exists and is empty.

    A shard holds whole tensors and at most `max_shard_bytes`, unless one tensor is larger.
    """
    cut = _Cut(directory, max_shard_bytes)
    for name, weight in release_tensors(model):
        parts = quantise_tensor(name, weight.detach(), policy=policy)
        blobs = {part: (tensor, _bytes(tensor)) for part, tensor in parts.items()}
        # Codes and their scales stay together: a server rebuilds from both.
        cut.make_room(sum(len(blob) for _, blob in blobs.values()))
        for part, (tensor, blob) in blobs.items():
            cut.add(part, tensor, blob)
    cut.close_shard()
    manifest = Manifest(
        job_id=job_id, policy_version=policy_version, shards=cut.shards, tensors=cut.tensors
    )
    _write(directory / MANIFEST_FILE, [manifest.model_dump_json().encode()])
    return manifest


@dataclass(slots=True)
class _Cut:
    """Fills one shard after the other."""

    directory: Path
    max_shard_bytes: int
    shards: list[ShardEntry] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    _open: list[memoryview] = field(default_factory=list)
    _size: int = 0

    def make_room(self, num_bytes: int) -> None:
        if self._open and self._size + num_bytes > self.max_shard_bytes:
            self.close_shard()

    def add(self, name: str, tensor: Tensor, blob: memoryview) -> None:
        self.tensors.append(
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
        self._open.append(blob)
        self._size += len(blob)

    def close_shard(self) -> None:
        if not self._open:
            return
        digest = xxhash.xxh3_128()
        for blob in self._open:
            digest.update(blob)
        index = len(self.shards)
        _write(self.directory / shard_file(index), self._open)
        entry = ShardEntry(index=index, num_bytes=self._size, checksum=digest.hexdigest())
        self.shards.append(entry)
        self._open, self._size = [], 0


def _bytes(tensor: Tensor) -> memoryview:
    """C-order little-endian bytes; numpy knows neither BF16 nor FP8, so the view is of bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _write(path: Path, blobs: list[memoryview] | list[bytes]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for blob in blobs:
            file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
