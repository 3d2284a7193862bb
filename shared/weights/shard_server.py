"""Shards of versions over HTTP, from files, by `sendfile` in threads: no event loop sees a byte.

    GET /v1/weights/{version}/shards/{i}      bytes of a shard, ranges from an offset
    GET /v1/weights/{version}/deltas/{i}      what changed in it since the manifest's base

The owner says which file it is: 404 if there is none, 503 if it is on its way, with how many bytes
of the version have come. The trainer's and the servers' are alike, so that a server passes on what
it has pulled.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, cast

import structlog

from shared.telemetry import counter

log = structlog.get_logger()

Kind = Literal["shards", "deltas"]


@dataclass(frozen=True, slots=True)
class Coming:
    """A file that is on its way to its server, which has `num_bytes` of the version so far."""

    num_bytes: int


Find = Callable[[int, Kind, int], Path | Coming | None]

MAX_CLIENTS = 64
SILENCE_S = 30.0  # a client that takes nothing for so long is dropped

_PATH = re.compile(r"^/v1/weights/(\d{1,12})/(shards|deltas)/(\d{1,6})$")
_RANGE = re.compile(r"^bytes=(\d{1,18})-$")


class ShardServer:
    """Serves from its construction until `close`. `find(version, kind, index)` runs in threads."""

    def __init__(self, find: Find, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = _Server((host, port), find)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="shards", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def sent_bytes(self) -> Counter[tuple[int, Kind, int]]:
        """By (version, kind, index)."""
        with self._server.lock:
            return Counter(self._server.sent)

    def forget(self, version: int) -> None:
        """Drop the numbers of a version that is gone."""
        with self._server.lock:
            for key in [key for key in self._server.sent if key[0] == version]:
                del self._server.sent[key]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], find: Find) -> None:
        super().__init__(address, _Handler)
        self.find = find
        self.lock = threading.Lock()
        self.slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self.sent: Counter[tuple[int, Kind, int]] = Counter()

    def count(self, key: tuple[int, Kind, int], num_bytes: int) -> None:
        with self.lock:
            self.sent[key] += num_bytes

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("shard_client_gone", client=str(client_address))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        asked = _PATH.match(self.path)
        if asked is None:
            return self._refuse(404, "no such path")
        version, kind, index = int(asked[1]), cast(Kind, asked[2]), int(asked[3])
        path = server.find(version, kind, index)
        if path is None:
            return self._refuse(404, f"{kind} {index} of version {version} is not offered")
        if isinstance(path, Coming):
            what = f"{kind} {index} of version {version} is on its way"
            return self._refuse(503, f"{what}, {path.num_bytes} bytes of the version are here")
        if not server.slots.acquire(blocking=False):
            return self._refuse(503, f"{MAX_CLIENTS} clients are served")
        try:
            self._send(path, (version, kind, index), server)
        finally:
            server.slots.release()

    def _send(self, path: Path, key: tuple[int, Kind, int], server: _Server) -> None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return self._refuse(404, "gone")
        with file:
            size, offset = path.stat().st_size, 0
            if wanted := self.headers.get("Range"):
                asked = _RANGE.match(wanted)
                if asked is None or int(asked[1]) >= size:
                    return self._refuse(416, f"{wanted} of {size} bytes")
                offset = int(asked[1])
            self.send_response(206 if offset else 200)
            if offset:
                self.send_header("Content-Range", f"bytes {offset}-{size - 1}/{size}")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size - offset))
            self.end_headers()
            # Counted before, so that whoever has the last byte finds it counted.
            server.count(key, size - offset)
            try:
                if size > offset:
                    self.connection.sendfile(file, offset)
            finally:
                sent = max(file.tell(), offset) - offset
                if left := size - offset - sent:  # on a broken connection
                    server.count(key, -left)
                counter(
                    "weights_sent_bytes_total", "Bytes of shards and deltas.", ("kind",)
                ).labels(key[1]).inc(sent)

    def _refuse(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are counted, not logged."""
