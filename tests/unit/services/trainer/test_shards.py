import json
from pathlib import Path

import pytest

from services.trainer.jobs.shards import INDEX_FILE, find_trouble


def shard(tensor_bytes: int, said: int) -> bytes:
    header = json.dumps({"__metadata__": {}, "w": {"data_offsets": [0, said]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(tensor_bytes)


def test_whole_files_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(shard(64, 64))
    assert find_trouble(tmp_path) is None
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert find_trouble(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (shard(63, 64), "a.safetensors has"),
        (shard(64, 64)[:20], "a.safetensors is no safetensors file"),
        (b"", "a.safetensors is no safetensors file"),
        ((4).to_bytes(8, "little") + b"{..}", "Expecting property name"),
        ((2).to_bytes(8, "little") + b"[]", "no attribute"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "data_offsets"),
    ],
)
def test_file_that_is_not_whole_is_named(tmp_path: Path, content: bytes, trouble: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert trouble in str(find_trouble(tmp_path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert find_trouble(tmp_path) == f"there are no weights in {tmp_path}"
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    assert find_trouble(tmp_path) == (
        f"{tmp_path / 'b.safetensors'} cannot be read: No such file or directory"
    )
