"""A rank serves what it has written, and tells all ranks where."""

import socket
from pathlib import Path

import httpx
import pytest

from services.trainer.engine import own_shards
from services.trainer.engine.own_shards import OwnShards
from services.trainer.launch import LISTEN_VARIABLE
from shared.weights.manifest import MANIFEST_FILE, shard_file


@pytest.mark.parametrize(
    ("listen", "host"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())]
)
def test_finished_versions_are_served_and_every_rank_knows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str, host: str
) -> None:
    monkeypatch.setenv(LISTEN_VARIABLE, listen)
    monkeypatch.setattr(own_shards, "gather_bytes", lambda mine: [b"http://rank-0", mine])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for version in (3, 4):
        (tmp_path / f"v{version:08d}").mkdir()
        (tmp_path / f"v{version:08d}" / shard_file(1)).write_bytes(b"bytes")
    (tmp_path / "v00000003" / MANIFEST_FILE).touch()
    shards = OwnShards(tmp_path)
    first, ours = shards.urls
    assert first == "http://rank-0"
    assert ours.startswith(f"http://{host}:")
    with httpx.Client() as http:
        assert http.get(f"{ours}/v1/weights/3/shards/1").content == b"bytes"
        for missing in ("3/shards/0", "3/deltas/1", "4/shards/1"):
            assert http.get(f"{ours}/v1/weights/{missing}").status_code == 404
    shards.close()
