"""The process that workers are forked from, with the graders imported once.

Commands come over the control socket, one packet each: `fork` brings a worker's socket and page,
`end` names a pid to kill and reap, `prepare` loads the heavy graders and then, between commands,
warms them up. Only this process knows which pids are its children's, so no other process can be
hit. It adopts what killed workers leave behind: their processes are killed and reaped, their
temporary folders removed. It has one thread, because it forks; when the service goes, so does it.
"""

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn, cast

import msgpack

from services.reward.graders.grader import HEAVY, Grader, addresses, load_grader
from services.reward.graders.warmth import WARM_UP
from services.reward.pool.grading import work
from services.reward.pool.wire import ProgressPage
from shared.process import adopt_orphans, children, die_with_parent, prepare_to_fork

MAX_PACKET_BYTES = 64 * 2**10


def main() -> None:
    parent_pid, descriptor = (int(argument) for argument in sys.argv[1:3])
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # the service ends us, after its last check
        signal.signal(number, signal.SIG_IGN)
    zygote = Zygote(socket.socket(fileno=descriptor))
    with contextlib.suppress(ConnectionError):  # the service is gone
        zygote.run()
    zygote.end_all()


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._settings = cast(dict[str, Any], msgpack.unpackb(control.recv(MAX_PACKET_BYTES)))
        self._graders: dict[str, Grader] = {}
        self._children: set[int] = set()
        self._dying: set[int] = set()  # killed; a niced process may take its time to go
        self._dead: dict[int, int] = {}  # exit codes of those that went by themselves
        self._cleaners: set[int] = set()  # they remove folders
        adopt_orphans()
        self._child_died, died = socket.socketpair()
        for end in (self._child_died, died):
            end.setblocking(False)
        self._wakeup = died
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(died.fileno(), warn_on_full_buffer=False)
        self._cold: list[tuple[str, str]] = []

    def run(self) -> None:
        """Serve commands until the service goes away."""
        if not self._load(set(self._addresses) - HEAVY):
            return
        prepare_to_fork()
        while True:
            patience_s = 0 if self._cold else None
            ready = select.select([self._control, self._child_died], [], [], patience_s)[0]
            if not ready:
                self._warm_up()
            if self._child_died in ready:
                self._reap()
            if self._control not in ready:
                continue
            body, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
            if not body:
                return
            command = msgpack.unpackb(body)
            if command["do"] == "fork":
                self._fork(command["id"], descriptors)
            elif command["do"] == "end":
                self._kill(command["id"])
                self._reap()  # it may have died long ago
            elif self._load(HEAVY):
                self._cold = list(reversed(WARM_UP))

    def end_all(self) -> None:
        for pid in list(self._children):
            self._kill(pid)
        while left := (children() | self._dying) - self._cleaners:
            for pid in left:
                self._kill_anything(pid)
                self._dying.discard(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        shutil.rmtree(self._settings["folder"], ignore_errors=True)

    @property
    def _addresses(self) -> dict[str, str]:
        return addresses(self._settings["plug_ins"])

    def _load(self, names: set[str]) -> bool:
        """Import graders, so that workers forked from now on have them."""
        try:
            self._graders |= {name: load_grader(self._addresses[name]) for name in names}
        except (ImportError, ValueError) as err:
            self._tell("failed", reason=str(err))
            return False
        gc.freeze()  # a collection in a worker would copy every page that it visits
        self._tell("loaded")
        return True

    def _warm_up(self) -> None:
        response, gold = self._cold.pop()
        self._graders["math"](response, gold)
        if not self._cold:
            gc.freeze()
            self._tell("warm")

    def _fork(self, request: int, descriptors: list[int]) -> None:
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as err:
            self._tell("failed", reason=f"cannot fork a grading process: {err.strerror}")
            return
        if pid == 0:
            self._become_worker(parent_pid, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children.add(pid)
        self._tell("forked", request, pid)

    def _become_worker(self, parent_pid: int, link: int, page: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for link_of_zygote in (self._control, self._child_died, self._wakeup):
                link_of_zygote.close()
            folder = self._folder_of(os.getpid())
            folder.mkdir(exist_ok=True)
            tempfile.tempdir = str(folder)
            work(
                self._graders,
                socket.socket(fileno=link),
                ProgressPage(page),
                memory_bytes=self._settings["memory_bytes"],
                parent_pid=parent_pid,
            )
            code = 0
        finally:
            os._exit(code)  # never back into the zygote's loop

    def _kill(self, pid: int) -> None:
        """Kill a worker with all that it started; `_reap` tells when it is gone."""
        if (code := self._dead.pop(pid, None)) is not None:
            self._tell("ended", pid, code)
        if pid not in self._children:
            return
        self._children.discard(pid)
        self._dying.add(pid)
        self._kill_anything(pid)

    def _kill_anything(self, pid: int) -> None:
        for kill in (os.killpg, os.kill):  # its group, if it came as far as having one
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._child_died.recv(4096)
        with contextlib.suppress(ChildProcessError):  # no child at all
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._reaped(pid, os.waitstatus_to_exitcode(status))
        for orphan in children() - self._children - self._dying - self._cleaners:
            self._kill_anything(orphan)

    def _reaped(self, pid: int, code: int) -> None:
        self._cleaners.discard(pid)
        if pid in self._dying:
            self._dying.discard(pid)
            self._tell("ended", pid, code)
        elif pid in self._children:
            self._children.discard(pid)
            self._dead[pid] = code
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has left behind
        else:
            return
        self._remove(self._folder_of(pid))

    def _folder_of(self, pid: int) -> Path:
        return Path(self._settings["folder"]) / str(pid)

    def _remove(self, folder: Path) -> None:
        """At once where it is empty; else in a process, since a program may leave many files."""
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            pid = os.fork()
            if pid == 0:
                _remove_all(folder)
            self._cleaners.add(pid)

    def _tell(self, event: str, number: int = 0, value: int = 0, *, reason: str = "") -> None:
        message = {"event": event, "id": number, "value": value, "reason": reason}
        self._control.send(cast(bytes, msgpack.packb(message)))


def _remove_all(folder: Path) -> NoReturn:
    """Whatever the modes of folders within it are; links are not followed."""
    try:
        os.nice(19)
        for path, folders, _ in os.walk(folder):
            for name in folders:
                inner = Path(path, name)
                if not inner.is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
