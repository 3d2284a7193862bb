"""Each rank's node serves the shards that its ranks have written: no process forwards the model.

One server per rank, from the first export on, for versions beside that one's directory.
"""

import os
import socket
from pathlib import Path

from services.trainer.engine.agreement import gather_bytes
from services.trainer.launch import LISTEN_VARIABLE
from shared.weights.manifest import MANIFEST_FILE, delta_file, shard_file
from shared.weights.shard_server import Kind, ShardServer

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  compared, not bound


class OwnShards:
    """Serves finished versions of `weights`, the directory that holds `v00000000` and so on."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        listen = _listen()
        host = socket.gethostname() if listen in EVERYWHERE else listen
        self._server = ShardServer(self._find, host=listen)
        self.urls = [
            url.decode() for url in gather_bytes(f"http://{host}:{self._server.port}".encode())
        ]

    def close(self) -> None:
        self._server.close()

    def _find(self, version: int, kind: Kind, index: int) -> Path | None:
        folder = self._weights / f"v{version:08d}"
        path = folder / (shard_file(index) if kind == "shards" else delta_file(index))
        return path if path.exists() and (folder / MANIFEST_FILE).exists() else None


def _listen() -> str:
    """Where the conductor listens, if all ranks are on its node; else this node's own name."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get(LISTEN_VARIABLE, "127.0.0.1") if one_node else socket.gethostname()
