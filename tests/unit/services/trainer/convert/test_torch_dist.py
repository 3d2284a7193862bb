import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.convert.torch_dist import (
    Chunk,
    TorchDist,
    is_torch_dist,
    write_chunk,
    write_index,
    write_integrity,
)
from shared.models.deepseek_v4.headers import CheckpointInvalid

FILE = "__0_1.distcp"


def write(folder: Path, tensor: Tensor, boxes: list[tuple[slice, ...]]) -> Path:
    """`tensor` as "w", one chunk for each box."""
    folder.mkdir()
    chunks = []
    with (folder / FILE).open("wb") as file:
        for box in boxes:
            part, offset = tensor[box], file.tell()
            write_chunk(file, part)
            index = tuple(s.start or 0 for s in box)
            size = file.tell() - offset
            chunks.append(Chunk("w", index, tuple(part.shape), FILE, offset, size))
    write_index(folder, {"w": (tensor.dtype, tuple(tensor.shape))}, chunks)
    return folder


def box(*bounds: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*bound) for bound in bounds)


CHUNKINGS = {
    "whole": [box((0, 4), (0, 6))],
    "rows": [box((i, i + 1), (0, 6)) for i in range(4)],
    "quarters": [box((r, r + 2), (c, c + 3)) for c in (0, 3) for r in (0, 2)],
    "uneven": [box((0, 1), (0, 6)), box((1, 4), (0, 5)), box((1, 4), (5, 6))],
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_any_piece_is_read_from_any_chunks(
    tmp_path: Path, chunking: str, dtype: torch.dtype
) -> None:
    tensor = torch.arange(24).view(4, 6).to(dtype)
    stored = TorchDist(write(tmp_path / "w", tensor, CHUNKINGS[chunking]))
    assert stored.dtype("w") == dtype
    assert torch.equal(stored.read("w"), tensor)
    for row in range(4):
        assert torch.equal(stored.read("w", (row,)), tensor[row])
    assert stored.read("w", (2, 5)) == tensor[2, 5]


def test_a_view_is_stored_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    tensor = torch.zeros(1000, 100)
    write(tmp_path / "w", tensor[:, :], [box((0, 1000), (0, 100))])
    with io.BytesIO() as file:
        write_chunk(file, tensor[3])
        assert file.tell() < 3000


def test_elements_that_no_chunk_holds_are_missed(tmp_path: Path) -> None:
    stored = TorchDist(write(tmp_path / "w", torch.zeros(4, 6), CHUNKINGS["rows"][:3]))
    assert stored.read("w", (2,)).shape == (6,)
    with pytest.raises(CheckpointInvalid, match="w: 18 of 24 elements are stored"):
        stored.read("w")


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", torch.zeros(4, 6), CHUNKINGS["whole"])
    file = folder / FILE
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(CheckpointInvalid, match=f"w: {FILE} is damaged"):
        TorchDist(folder).read("w")


class _Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("true",)


@pytest.mark.parametrize("content", [_Evil(), Path.unlink, {"a": 1}, io.BytesIO(b"x")])
def test_metadata_makes_nothing_but_metadata(tmp_path: Path, content: object) -> None:
    folder = write(tmp_path / "w", torch.zeros(4, 6), CHUNKINGS["whole"])
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointInvalid, match=r"\.metadata: (refuses to make|expected Metadata)"):
        TorchDist(folder)


def test_integrity_lists_every_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", torch.zeros(4, 6), CHUNKINGS["whole"])
    assert is_torch_dist(folder)
    write_integrity(folder, {FILE: "abc"})
    listed = (folder / "integrity.json").read_text()
    assert '"abc"' in listed
    assert all(path.name in listed for path in folder.iterdir() if path.name != "integrity.json")
