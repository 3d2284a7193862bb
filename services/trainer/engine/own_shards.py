"""Each rank's node serves the shards that its ranks have written: no process forwards the model.

One server per rank, from the first export on, for versions beside that one's directory.
"""

import os
import socket
from pathlib import Path

from services.trainer.engine.agreement import gather_bytes
from shared.weights.manifest import MANIFEST_FILE, delta_file, shard_file
from shared.weights.shard_server import Kind, ShardServer


class OwnShards:
    """Serves finished versions of `weights`, the directory that holds `v00000000` and so on."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        host = _host()
        self._server = ShardServer(self._find, host=host)
        self.urls = [
            url.decode() for url in gather_bytes(f"http://{host}:{self._server.port}".encode())
        ]

    def close(self) -> None:
        self._server.close()

    def _find(self, version: int, kind: Kind, index: int) -> Path | None:
        folder = self._weights / f"v{version:08d}"
        path = folder / (shard_file(index) if kind == "shards" else delta_file(index))
        return path if path.exists() and (folder / MANIFEST_FILE).exists() else None


def _host() -> str:
    """Loopback unless ranks are on several nodes."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if one_node else socket.gethostname()
