"""The process that workers are forked from, with the graders imported once.

Commands come over the control socket, one packet each: `fork` brings a worker's socket and page,
`end` names a pid to kill and reap, `prepare` loads the heavy graders and then, between commands,
warms them up. Only this process knows which pids are its children's, so no other process can be
hit. It has one thread, because it forks; when the service goes, so does it.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn, cast

import msgpack

from services.reward.graders.grader import HEAVY, Grader, addresses, load_grader
from services.reward.graders.warmth import WARM_UP
from services.reward.pool.grading import work
from services.reward.pool.wire import ProgressPage
from shared.process import die_with_parent, prepare_to_fork

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
        for pid in self._dying:
            os.waitpid(pid, 0)

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
        if pid not in self._children:
            return
        self._children.discard(pid)
        self._dying.add(pid)
        for kill in (os.killpg, os.kill):  # its group, if it came as far as having one
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._child_died.recv(4096)
        for pid in list(self._dying):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._dying.discard(pid)
                self._tell("ended", pid, os.waitstatus_to_exitcode(status))

    def _tell(self, event: str, number: int = 0, value: int = 0, *, reason: str = "") -> None:
        message = {"event": event, "id": number, "value": value, "reason": reason}
        self._control.send(cast(bytes, msgpack.packb(message)))


if __name__ == "__main__":
    main()
