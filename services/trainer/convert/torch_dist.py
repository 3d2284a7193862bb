"""Megatron's torch_dist format, tensor by tensor: what its own functions do for a whole model.

A directory holds `.metadata` (which chunk of which tensor lies where), `*.distcp` files (one saved
tensor after the other), `metadata.json` (Megatron's mark) and `integrity.json` (hashes of all).
"""

import hashlib
import io
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shared.models.deepseek_v4.headers import CheckpointInvalid

MARK_FILE = "metadata.json"
METADATA_FILE = ".metadata"
INTEGRITY_FILE = "integrity.json"
INTEGRITY_HASH = "sha256"

_MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_DCP_VERSION = "1.0.0"
_COMMON_KEY = "common_state/shard_0_1"  # where Megatron looks for what is no tensor
_COMMON_FILE = "__0_0.distcp"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor as it lies in a file."""

    tensor: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


class TorchDist:
    """The tensors of a directory. Keeps one chunk, so read the pieces of a tensor in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = _read_metadata(folder / METADATA_FILE)
        self._storage: Mapping[Any, Any] = metadata.storage_data or {}
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._last: tuple[MetadataIndex | None, Tensor] = (None, torch.empty(0))

    @property
    def files(self) -> list[Path]:
        """Every file with tensors."""
        return sorted({self._folder / info.relative_path for info in self._storage.values()})

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """`tensor[index]`, put together from the chunks that overlap it."""
        entry = self.tensors[name]
        size = tuple(entry.size)
        low = (*index, *[0] * (len(size) - len(index)))
        high = (*(i + 1 for i in index), *size[len(index) :])
        box = torch.empty([h - b for b, h in zip(low, high, strict=True)], dtype=self.dtype(name))
        covered = 0
        for chunk in entry.chunks:
            both = _overlap(low, high, chunk)
            if both is None:
                continue
            begin, end = both
            place = _slices(begin, end, low)
            box[place] = self._chunk(name, chunk)[_slices(begin, end, tuple(chunk.offsets))]
            covered += box[place].numel()
        if covered != box.numel():
            raise CheckpointInvalid(f"{name}: {covered} of {box.numel()} elements are stored")
        return box.view(box.shape[len(index) :])

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.tensors[name].properties.dtype
        return dtype

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        key = MetadataIndex(name, chunk.offsets)
        if self._last[0] == key:
            return self._last[1]
        if key not in self._storage:
            raise CheckpointInvalid(f"{name}: no bytes are listed for its chunk {key.offset}")
        info = self._storage[key]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointInvalid(f"{name}: is compressed by {info.transform_descriptors}")
        self._last = (None, torch.empty(0))  # free the old one first
        with (self._folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            raw = io.BytesIO(file.read(info.length))
        try:
            tensor: Tensor = torch.load(raw, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as err:
            raise CheckpointInvalid(f"{name}: {info.relative_path} is damaged: {err}") from err
        if tensor.shape != chunk.sizes:
            raise CheckpointInvalid(
                f"{name}: expected a chunk of {list(chunk.sizes)}, found {list(tensor.shape)}"
            )
        self._last = (key, tensor)
        return tensor


def chunk_file(number: int) -> str:
    """Name of a file of tensors, as a first rank gives it."""
    return f"__0_{number + 1}.distcp"


def is_torch_dist(folder: Path) -> bool:
    return (folder / MARK_FILE).exists() and (folder / METADATA_FILE).exists()


def write_chunk(file: Any, tensor: Tensor) -> None:
    """One chunk, from where the file stands."""
    # Saving a view would save all that it is a view of.
    alone = tensor.contiguous()
    torch.save(alone.clone() if alone.untyped_storage().nbytes() > alone.nbytes else alone, file)


def write_index(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Iterable[Chunk],
) -> None:
    """Everything but the tensors: metadata, Megatron's common state and its mark."""
    kinds: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(shape), chunks=[]
        )
        for name, (dtype, shape) in tensors.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        offsets, sizes = torch.Size(chunk.index), torch.Size(chunk.shape)
        kinds[chunk.tensor].chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        key = MetadataIndex(chunk.tensor, offsets)
        storage[key] = _StorageInfo(chunk.file, chunk.offset, chunk.num_bytes)
    torch.save([{}], folder / _COMMON_FILE)
    kinds[_COMMON_KEY] = BytesStorageMetadata()
    size = (folder / _COMMON_FILE).stat().st_size
    storage[MetadataIndex(_COMMON_KEY)] = _StorageInfo(_COMMON_FILE, 0, size)
    metadata = Metadata(kinds, storage_data=storage, version=_DCP_VERSION)
    with (folder / METADATA_FILE).open("wb") as file:
        pickle.dump(metadata, file)  # the format's own choice; read below without trust
    (folder / MARK_FILE).write_text(json.dumps(_MARK))


def write_integrity(folder: Path, known: Mapping[str, str]) -> None:
    """Hashes of every file, as Megatron verifies them; those in `known` are not read again."""
    hashes = {
        path.name: known.get(path.name) or _file_hash(path)
        for path in sorted(folder.iterdir())
        if path.name != INTEGRITY_FILE
    }
    content = {"algorithm": INTEGRITY_HASH, "files": hashes}
    (folder / INTEGRITY_FILE).write_text(json.dumps(content, indent=2))


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, INTEGRITY_HASH).hexdigest()


def _overlap(
    low: tuple[int, ...], high: tuple[int, ...], chunk: ChunkStorageMetadata
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    begin = tuple(max(a, b) for a, b in zip(low, chunk.offsets, strict=True))
    ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    end = tuple(min(a, b) for a, b in zip(high, ends, strict=True))
    return None if any(b >= e for b, e in zip(begin, end, strict=True)) else (begin, end)


def _slices(
    begin: tuple[int, ...], end: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[slice, ...]:
    return tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, origin, strict=True))


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as err:
        raise CheckpointInvalid(f"{file}: {err}") from err
    if not isinstance(metadata, Metadata):
        raise CheckpointInvalid(f"{file}: expected Metadata, found {type(metadata).__name__}")
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes the format's own value classes and nothing else: a checkpoint may come from anyone."""

    _MODULES = tuple(
        f"torch.distributed.checkpoint.{m}" for m in ("metadata", "planner", "filesystem")
    )
    _OTHERS = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if module in self._MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"refuses to make {module}.{name}")
