"""Tensors as byte ranges of files: safetensors shards, or the shards of a published version.

Headers are read and checked at once, bytes when asked for: memory for one tensor, or one piece of
it, at a time. Nothing is mapped, so nothing stays resident either.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.trainer.versions import CHANGES_ONLY, restore_version
from shared.models.deepseek_v4.checkpoint import CheckpointInvalid
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


def safetensors_extents(file: Path) -> dict[str, Extent]:
    """Every tensor of one file; CheckpointInvalid if its header does not fit it."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    extents = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = "I8" if entry["dtype"] == "U8" else entry["dtype"]
        if dtype not in DTYPES:
            raise CheckpointInvalid(f"{name}: expected one of {', '.join(DTYPES)}, found {dtype}")
        extents[name] = Extent(file, 8 + length + begin, dtype, tuple(entry["shape"]))
        if extents[name].num_bytes != end - begin:
            raise CheckpointInvalid(
                f"{name}: {end - begin} bytes in {file.name}, but "
                f"{dtype} {entry['shape']} has {extents[name].num_bytes}"
            )
        _check_size(file, 8 + length + end)
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
