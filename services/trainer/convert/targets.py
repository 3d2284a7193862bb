"""What can be written: safetensors with an index, or a torch_dist directory; shard by shard.

A target is asked for its shards, writes each of them piece by piece, and at the end the small files
that make a directory of shards a checkpoint, the index last.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import xxhash
from torch import Tensor

from services.trainer.convert import torch_dist
from services.trainer.convert.flat_files import DTYPES
from services.trainer.convert.layouts import Output, Piece
from services.trainer.convert.torch_dist import Chunk
from shared.models.deepseek_v4.checkpoint import SINGLE_FILE
from shared.models.deepseek_v4.headers import INDEX_FILE

_HASHES: dict[str, Any] = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_SAVED_TENSOR_BYTES = 2048  # at most, around the numbers of one chunk


@dataclass(frozen=True, slots=True)
class Shard:
    file: str
    outputs: tuple[Output, ...]
    num_bytes: int
    """At most: what has to be free."""


class HashedFile:
    """A file that is hashed while it is written; use it in a `with`."""

    def __init__(self, path: Path, algorithm: str) -> None:
        self._file = path.open("wb")
        self._digest = _HASHES[algorithm]()
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self.num_bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> str:
        """Everything onto the disk; the checksum so far, in hexadecimal."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return str(self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()


class Target(Protocol):
    algorithm: str

    def shards(self, groups: Sequence[Sequence[Output]]) -> list[Shard]: ...

    def begin(self, file: HashedFile, shard: Shard) -> None: ...

    def put(self, file: HashedFile, output: Output, piece: Piece, tensor: Tensor) -> list[Any]:
        """Write a piece; a row for the index, or nothing. Pieces come in order."""

    def finish(
        self,
        folder: Path,
        shards: Sequence[Shard],
        rows: list[list[Any]],
        checksums: dict[str, str],
    ) -> None:
        """The index, from the rows of all pieces and the checksums by file."""


class Safetensors:
    """The layout of releases and of transformers."""

    algorithm = "xxh3-128"

    def shards(self, groups: Sequence[Sequence[Output]]) -> list[Shard]:
        count = len(groups)
        files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        files = [SINGLE_FILE] if count == 1 else files
        return [self._shard(file, group) for file, group in zip(files, groups, strict=True)]

    def begin(self, file: HashedFile, shard: Shard) -> None:
        file.write(_header(shard.outputs))

    def put(self, file: HashedFile, output: Output, piece: Piece, tensor: Tensor) -> list[Any]:
        file.write(tensor_bytes(tensor))
        return []

    def finish(
        self,
        folder: Path,
        shards: Sequence[Shard],
        rows: list[list[Any]],
        checksums: dict[str, str],
    ) -> None:
        if len(shards) == 1:
            return
        outputs = {
            output.name: (output, shard.file) for shard in shards for output in shard.outputs
        }
        total = sum(output.num_bytes for output, _ in outputs.values())
        weight_map = {name: file for name, (_, file) in outputs.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _shard(self, file: str, group: Sequence[Output]) -> Shard:
        # Wide numbers first: readers map them and need them aligned.
        outputs = sorted(group, key=lambda output: -DTYPES[output.dtype].itemsize)
        size = sum(output.num_bytes for output in outputs)
        return Shard(file, tuple(outputs), size + len(_header(outputs)))


class MegatronTorchDist:
    """The actor's own checkpoints; every piece is a chunk."""

    algorithm = torch_dist.INTEGRITY_HASH

    def shards(self, groups: Sequence[Sequence[Output]]) -> list[Shard]:
        return [
            Shard(
                torch_dist.chunk_file(number),
                tuple(group),
                sum(out.num_bytes + _SAVED_TENSOR_BYTES * len(out.pieces) for out in group),
            )
            for number, group in enumerate(groups)
        ]

    def begin(self, file: HashedFile, shard: Shard) -> None:
        pass

    def put(self, file: HashedFile, output: Output, piece: Piece, tensor: Tensor) -> list[Any]:
        offset = file.num_bytes
        rest = len(output.shape) - len(piece.index)
        index = (*piece.index, *[0] * rest)
        shape = (*[1] * len(piece.index), *tensor.shape)
        torch_dist.write_chunk(file, tensor.reshape(shape))
        return [output.name, index, shape, offset, file.num_bytes - offset]

    def finish(
        self,
        folder: Path,
        shards: Sequence[Shard],
        rows: list[list[Any]],
        checksums: dict[str, str],
    ) -> None:
        outputs = [output for shard in shards for output in shard.outputs]
        file_of = {output.name: shard.file for shard in shards for output in shard.outputs}
        chunks = [
            Chunk(name, tuple(index), tuple(shape), file_of[name], offset, size)
            for name, index, shape, offset, size in rows
        ]
        kinds = {output.name: (DTYPES[output.dtype], output.shape) for output in outputs}
        torch_dist.write_index(folder, kinds, chunks)
        torch_dist.write_integrity(folder, checksums)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """C order, little endian; numpy knows neither BF16 nor FP8, so the view is of bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def file_checksum(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        digest = _HASHES[algorithm]()
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def _header(outputs: Sequence[Output]) -> bytes:
    """Of a safetensors file: the numbers that follow it begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        begin, end = end, end + output.num_bytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
