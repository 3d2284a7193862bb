"""Shards over HTTP: ranges, refusals, and how many bytes went out."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.errors import HttpFailed
from shared.http import download
from shared.weights.shard_server import Coming, ShardServer

BODY = bytes(range(256)) * 400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "0").write_bytes(BODY)
    (tmp_path / "1").write_bytes(b"")

    def find(version: int, kind: str, index: int):  # type: ignore[no-untyped-def]
        if version == 8:
            return Coming(5)
        if version == 9:
            return tmp_path / "gone meanwhile"
        path = tmp_path / str(index)
        return path if kind == "shards" and version == 7 and path.exists() else None

    server = ShardServer(find)
    yield server
    server.close()


def test_bytes_are_served_whole_and_from_an_offset(server: ShardServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/weights/7/shards/0"
    target = tmp_path / "target"
    target.write_bytes(BODY[:1000])
    download(url, target, expected_bytes=len(BODY), offset=1000)
    assert target.read_bytes() == BODY
    whole = bytearray(len(BODY))
    download(url, whole, expected_bytes=len(BODY))
    assert bytes(whole) == BODY
    assert server.sent_bytes == {(7, "shards", 0): 2 * len(BODY) - 1000}
    server.forget(7)
    assert not server.sent_bytes


def test_what_a_client_did_not_take_is_not_counted(server: ShardServer, tmp_path: Path) -> None:
    (tmp_path / "2").write_bytes(bytes(32 * 2**20))  # more than a socket's buffers hold
    with socket.create_connection(("127.0.0.1", server.port), timeout=60.0) as client:
        client.sendall(b"GET /v1/weights/7/shards/2 HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    key, ends_s = (7, "shards", 2), time.monotonic() + 60.0
    while not 0 < server.sent_bytes[key] < 32 * 2**20 and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert 0 < server.sent_bytes[key] < 32 * 2**20


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/weights/7/shards/2", 404),
        ("/v1/weights/7/deltas/0", 404),
        ("/v1/weights/8/shards/0", 503),
        ("/v1/weights/9/shards/0", 404),
        ("/v1/weights/../../etc/passwd", 404),
        ("/v1/weights/7/shards/0/../1", 404),
        ("/v1/weights/7777777777777777777/shards/0", 404),
        ("/metrics", 404),
    ],
)
def test_what_is_not_there_is_refused(server: ShardServer, path: str, status: int) -> None:
    url = f"http://127.0.0.1:{server.port}{path}"
    with pytest.raises(HttpFailed) as failed:
        download(url, bytearray(10), expected_bytes=10)
    assert failed.value.status == status


def test_ranges_that_make_no_sense_are_refused(server: ShardServer) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/weights/7/shards/"
    with httpx.Client() as http:
        for wanted in ("bytes=5-9", "bytes=-5", "bytes=999999-", "lines=1-"):
            assert http.get(url + "0", headers={"Range": wanted}).status_code == 416
        empty = http.get(url + "1")
        assert (empty.status_code, empty.content) == (200, b"")
        assert http.post(url + "0").status_code == 501
