"""Tensors as byte ranges of files: safetensors shards, or the shards of a published version.

Headers are read and checked at once, bytes when asked for: memory for one tensor, or one piece of
it, at a time. Nothing is mapped, so nothing stays resident either.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.trainer.versions import restore_version
from shared.models.deepseek_v4.headers import CheckpointInvalid, read_headers
from shared.weights.kept import CHANGES_ONLY
from shared.weights.manifest import MANIFEST_FILE, Manifest, shard_file

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}
"""By the names that safetensors and manifests use."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one tensor lies: C order, from byte `offset` of `file`."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_extent(extent: Extent, *, piece: int = 0, num_pieces: int = 1) -> Tensor:
    """The `piece`-th of `num_pieces` equal parts of a tensor, flat; the whole by default."""
    size = extent.num_bytes // num_pieces
    raw = np.fromfile(extent.file, dtype=np.uint8, count=size, offset=extent.offset + piece * size)
    if len(raw) != size:
        raise CheckpointInvalid(f"{extent.file}: expected {size} more bytes, found {len(raw)}")
    return torch.from_numpy(raw).view(DTYPES[extent.dtype])


def safetensors_extents(folder: Path) -> dict[str, Extent]:
    """Every tensor of the files of `folder`; CheckpointInvalid if a header does not fit."""
    extents = {}
    for name, stored in read_headers(folder).items():
        if stored.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointInvalid(f"{name}: expected one of {known}, found {stored.dtype}")
        extents[name] = Extent(stored.file, stored.offset, stored.dtype, stored.shape)
    return extents


def version_extents(folder: Path) -> dict[str, Extent]:
    """Every tensor of a published version, by its manifest.

    One that its run keeps as changes is rebuilt where it lies.
    """
    if (folder / CHANGES_ONLY).exists():
        restore_version(folder)
    manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    for shard in manifest.shards:
        _check_size(folder / shard_file(shard.index), shard.num_bytes)
    return {
        tensor.name: Extent(
            folder / shard_file(tensor.shard), tensor.offset, tensor.dtype, tuple(tensor.shape)
        )
        for tensor in manifest.tensors
    }


def _check_size(file: Path, least: int) -> None:
    found = file.stat().st_size if file.exists() else 0
    if found < least:
        raise CheckpointInvalid(f"{file}: expected at least {least} bytes, found {found}")
