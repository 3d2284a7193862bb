"""Shards over a real connection: whole, resumed, and all the ways they can be wrong."""

import contextlib
import resource
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import xxhash

from shared.errors import HttpFailed
from shared.http import download

SHARD = bytes(range(256)) * 20_000  # 5 MB
DIGEST = xxhash.xxh3_128(SHARD).hexdigest()


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"no such shard")
            return
        begin = int(self.headers.get("Range", "bytes=0-")[6:-1])
        body = SHARD[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may refuse the length
            self.wfile.write(body[:1_000_000] if self.path == "/cut" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_whole_shard_into_memory(address):
    buffer = bytearray(len(SHARD))
    result = download(f"{address}/shard", buffer, expected_bytes=len(SHARD))
    assert (result.num_bytes, result.xxh3_128) == (len(SHARD), DIGEST)
    assert buffer == SHARD


def test_whole_shard_into_a_file(address, tmp_path):
    target = tmp_path / "shard"
    result = download(f"{address}/shard", target, expected_bytes=len(SHARD))
    assert result.xxh3_128 == DIGEST
    assert target.read_bytes() == SHARD


@pytest.mark.parametrize("offset", [1, 1_500_001, len(SHARD) - 1])
def test_resumed_download_hashes_the_whole(address, tmp_path, offset):
    target = tmp_path / "shard"
    target.write_bytes(SHARD[:offset])
    result = download(f"{address}/shard", target, expected_bytes=len(SHARD), offset=offset)
    assert (result.num_bytes, result.xxh3_128) == (len(SHARD) - offset, DIGEST)
    assert target.read_bytes() == SHARD

    buffer = bytearray(SHARD[:offset].ljust(len(SHARD), b"\0"))
    result = download(f"{address}/shard", buffer, expected_bytes=len(SHARD), offset=offset)
    assert (result.xxh3_128, bytes(buffer)) == (DIGEST, SHARD)


@pytest.mark.parametrize(
    ("path", "expected_bytes", "sentence"),
    [
        ("/missing", len(SHARD), "404: no such shard"),
        ("/shard", len(SHARD) + 1, "5120000 bytes offered, 5120001 expected"),
        ("/shard", len(SHARD) - 1, "5120000 bytes offered, 5119999 expected"),
        ("/cut", len(SHARD), "ended at byte 1000000 of 5120000"),
    ],
)
def test_wrong_answer_is_named(address, tmp_path, path, expected_bytes, sentence):
    with pytest.raises(HttpFailed, match=sentence):
        download(address + path, tmp_path / "shard", expected_bytes=expected_bytes)
    with pytest.raises(HttpFailed, match=sentence):
        download(address + path, bytearray(expected_bytes), expected_bytes=expected_bytes)


def test_what_a_full_disk_did_not_take_has_not_arrived(address, tmp_path):
    """The write that meets its end takes a part and raises nothing: the next one does."""
    target, told = tmp_path / "shard", []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_001, before[1]))
    try:
        with pytest.raises(HttpFailed, match=f"200: cannot write {target}: File too large"):
            download(f"{address}/shard", target, expected_bytes=len(SHARD), arrived=told.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert target.stat().st_size == 3_000_001
    assert 0 < max(told) <= 3_000_001


def test_absent_server_is_an_http_failure(free_port):
    with pytest.raises(HttpFailed, match="ConnectionRefusedError"):
        download(f"http://127.0.0.1:{free_port}/x", bytearray(1), expected_bytes=1, timeout_s=1)


def test_other_schemes_are_refused():
    with pytest.raises(ValueError, match="not an http address"):
        download("file:///etc/passwd", bytearray(1), expected_bytes=1)
