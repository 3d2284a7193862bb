"""Whether a checkpoint's weight files are whole, by their headers alone.

A copy that was cut short is refused when a job names it, not when the ranks have died of it.
"""

import json
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8


def find_trouble(checkpoint: Path) -> str | None:
    """One sentence on the first file that is missing, cut or no safetensors file."""
    try:
        names = _named_files(checkpoint) or {path.name for path in checkpoint.glob("*.safetensors")}
        if not names:
            return f"there are no weights in {checkpoint}"
        for name in sorted(names):
            _check(checkpoint / name)
    except OSError as err:
        return f"{err.filename} cannot be read: {err.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        return f"{checkpoint} is no checkpoint: {err}"
    return None


def _named_files(checkpoint: Path) -> set[str]:
    index = checkpoint / INDEX_FILE
    return set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()


def _check(path: Path) -> None:
    """The file is as long as its header says: 8 bytes, the header, the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, its header speaks of {expected}")
