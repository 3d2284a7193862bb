"""What a directory of safetensors files says it holds, checked before a byte is used; no torch.

Every fault is a `CheckpointInvalid` that names the file, and the tensor where there is one.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_WIDTHS |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)


class CheckpointInvalid(ValueError):
    """A release that does not match its architecture: tensor, expected, found."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of one tensor: C order, from byte `offset` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of `folder`, each in one file only: in that which the index names, if any."""
    index = folder / INDEX_FILE
    file_of = _read_index(index) if index.exists() else {}
    files = {folder / file for file in file_of.values()} | {*folder.glob("model*.safetensors")}
    if not files:
        raise CheckpointInvalid(f"{folder}: expected model*.safetensors, found none")
    stored: dict[str, StoredTensor] = {}
    for file in sorted(files):
        for name, tensor in read_header(file).items():
            if name in stored:
                raise CheckpointInvalid(
                    f"{name}: expected in one file, found in {stored[name].file} and {file}"
                )
            if (listed := file_of.get(name, file.name)) != file.name:
                raise CheckpointInvalid(f"{name}: expected by {index} in {listed}, found in {file}")
            stored[name] = tensor
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; all their bytes are there."""
    if not file.exists():
        raise CheckpointInvalid(f"{file}: expected by the index, found no such file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointInvalid(f"{file}: a header of {length} bytes does not fit the file")
        header = _parsed(file, stream.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _tensor(file, name, entry, 8 + length, size) for name, entry in entries.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = _parsed(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointInvalid(f"{index}: expected weight_map to be an object, found no such")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointInvalid(f"{index}: {name}: expected a file's name, found {file!r}")
    return weight_map


def _parsed(file: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as err:  # of JSON, or of UTF-8
        raise CheckpointInvalid(f"{file}: expected JSON, found none: {err}") from err
    if not isinstance(found, dict):
        raise CheckpointInvalid(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def _tensor(file: Path, name: str, entry: Any, begins_at: int, file_bytes: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            parts = "dtype, shape and data_offsets"
            raise CheckpointInvalid(f"{file}: {name}: expected {parts}, found {str(entry)[:200]}")
    if not all(isinstance(dim, int) and dim >= 0 for dim in shape) or not 0 <= begin <= end:
        raise CheckpointInvalid(f"{file}: {name}: expected sizes, found {str(entry)[:200]}")
    expected = math.prod(shape) * _WIDTHS.get(dtype, 0)
    if dtype in _WIDTHS and expected != end - begin:
        raise CheckpointInvalid(
            f"{name}: {end - begin} bytes in {file}, but {dtype} {shape} has {expected}"
        )
    if file_bytes < begins_at + end:
        least = f"expected at least {begins_at + end} bytes for {name}"
        raise CheckpointInvalid(f"{file}: {least}, found {file_bytes}")
    # Some repackages call the two FP4 codes of a byte unsigned.
    return StoredTensor(file, "I8" if dtype == "U8" else dtype, tuple(shape), begins_at + begin)
