"""What a process owes its machine: ports, memory, and dying with its parent.

Standard library only, and readable by older Pythons: it is the part that tells people what is
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

MIN_PYTHON = (3, 11)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CGROUP = Path("/sys/fs/cgroup")


def exit_with(sentence: str) -> NoReturn:
    """Tell people on stderr, in one sentence and without a traceback, and end with code 1."""
    sys.stderr.write(sentence.rstrip() + "\n")
    sys.stderr.flush()
    raise SystemExit(1)


def check_machine(min_memory_bytes: int) -> None:
    """End with one sentence when Python is too old or memory too small for what is to be run."""
    if sys.version_info < MIN_PYTHON:
        have, need = (".".join(map(str, v[:2])) for v in (sys.version_info, MIN_PYTHON))
        exit_with(f"Tandem needs Python {need} or newer; this is Python {have} ({sys.executable}).")
    available = available_memory_bytes()
    if available < min_memory_bytes:
        exit_with(
            f"Tandem needs {min_memory_bytes / 2**30:.1f} GiB of free memory for this; "
            f"{available / 2**30:.1f} GiB are available."
        )


def available_memory_bytes() -> int:
    """What can be allocated without swapping, within the container's limit if there is one."""
    fields = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")))
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _lines(_CGROUP / "memory.max")
    if not limit or limit[0] == "max":
        return available
    used = int(_lines(_CGROUP / "memory.current")[0])
    stat = dict(line.split(" ", 1) for line in _lines(_CGROUP / "memory.stat"))
    reclaimable = int(stat.get("inactive_file", 0))
    return min(available, int(limit[0]) - used + reclaimable)


def available_cores() -> int:
    """Cores that may compute at a time, within the container's limit if there is one."""
    cores = len(os.sched_getaffinity(0))
    limit = _lines(_CGROUP / "cpu.max")
    if not limit or limit[0].startswith("max"):
        return cores
    quota, period = map(int, limit[0].split())
    return min(cores, -(-quota // period))


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Call it first thing in a child, with the parent's pid where that is known: a parent that is
    already gone is noticed. Survives exec, is not inherited by children: each calls it itself.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, to kill and reap them."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Pids of this (single) thread's children, adopted ones and zombies included."""
    pid = os.getpid()
    return {
        int(one)
        for line in _lines(Path(f"/proc/{pid}/task/{pid}/children"))
        for one in line.split()
    }


def kill_marked(variable: str, value: str) -> None:
    """Kill every process that was started with `variable=value` in its environment.

    Sessions, groups and dead parents do not matter: descendants inherit their environment.
    """
    mark = f"{variable}={value}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def prepare_to_fork() -> None:
    """Load what `die_with_parent` needs, so that nothing is imported between fork and exec."""
    _libc()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_in_use(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
