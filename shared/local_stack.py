"""The system on one machine without containers: start in order, restart, stop in reverse.

Each program has a keeper: start it, wait until it is ready, wait until it dies, sweep up what it
left, start it again after a growing pause. A program that dies several times without having been
ready fails the whole stack, with the end of its log. All die with this process, even on `kill -9`.

    [broker] ready ─> [trainer, rollout-0, rollout-1] ready ─> ...     stop: the same, backwards
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog

from shared.errors import DeadlineExceeded, StackFailed
from shared.process import die_with_parent, kill_marked, port_in_use, prepare_to_fork
from shared.readiness import Ready
from shared.tasks import end, to_the_end, wait_for_event

log = structlog.get_logger()
OnLine = Callable[[str, str], None]  # program name, one line of its output

_LOG_TAIL_LINES = 15
_MAX_START_DEATHS = 3
_SETTLE_S = 1.0  # a program without a readiness check counts as ready after so long
_STEADY_S = 60.0  # having lived so long, a program is restarted without a longer pause
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0
_POLL_S = 0.1
_MARK = "TANDEM_PROGRAM"  # in the environment of a program and, inherited, of all it ever starts


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ready: Ready | None = None
    ready_s: float = 60.0
    stop_s: float = 20.0
    cwd: Path | None = None
    port: int | None = None  # on loopback; must be free when the stack starts


@contextlib.asynccontextmanager
async def running(
    programs: Sequence[Program | Sequence[Program]],
    *,
    log_dir: Path,
    on_line: OnLine | None = None,
) -> AsyncIterator["Stack"]:
    """Run the programs in order, a nested sequence in parallel; yield once all are ready.

    Raises `StackFailed` on entering or, cancelling the body, when a program cannot be kept alive.
    """
    groups = [[entry] if isinstance(entry, Program) else list(entry) for entry in programs]
    _check_ports(groups)
    prepare_to_fork()
    stack = Stack(log_dir)
    try:
        async with asyncio.TaskGroup() as keepers:
            tails = LogTails(log_dir, [program.name for group in groups for program in group])
            tailing = keepers.create_task(tails.follow(on_line)) if on_line else None
            try:
                for group in groups:
                    await stack.start(group, keepers)
                yield stack
            finally:
                await to_the_end(stack.stop(groups))  # Ctrl-C by now would leave it half done
                if tailing and on_line:
                    await end(tailing)
                    tails.emit(on_line)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


class Stack:
    """The running programs; `pids` and `restarts` are by program name."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = log_dir
        self.restarts: dict[str, int] = {}
        self._id = uuid.uuid4().hex
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    async def ready(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until the program is ready, for instance again after it was killed."""
        if not await wait_for_event(self._up[name], timeout_s):
            raise DeadlineExceeded(f"{name} to be ready", timeout_s)

    async def start(self, group: Sequence[Program], keepers: asyncio.TaskGroup) -> None:
        for program in group:
            self._up[program.name] = asyncio.Event()
            self.restarts[program.name] = 0
            self._keepers[program.name] = keepers.create_task(
                self._keep(program), name=program.name
            )
        for program in group:
            await self._up[program.name].wait()  # bounded: its keeper fails at the deadline

    async def stop(self, groups: Sequence[Sequence[Program]]) -> None:
        for keeper in self._keepers.values():
            await end(keeper)
        for group in reversed(groups):
            started = [program for program in group if program.name in self._processes]
            await asyncio.gather(*(self._stop(program) for program in started))

    async def _keep(self, program: Program) -> None:
        deaths_before_ready = 0
        backoff_s = _MIN_BACKOFF_S
        while True:
            began_s = time.monotonic()
            process = await self._spawn(program)
            was_ready = await self._became_ready(program, process)
            code = await process.wait()
            self._up[program.name].clear()
            self._sweep(program)
            deaths_before_ready = 0 if was_ready else deaths_before_ready + 1
            if deaths_before_ready >= _MAX_START_DEATHS:
                raise StackFailed(
                    f"{program.name} died {deaths_before_ready} times while starting "
                    f"({_how_it_ended(code)}); {self._tail(program.name)}"
                )
            if time.monotonic() - began_s > _STEADY_S:
                backoff_s = _MIN_BACKOFF_S
            log.warning(
                "program_died",
                program=program.name,
                ended=_how_it_ended(code),
                restart_in_s=backoff_s,
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
            self.restarts[program.name] += 1

    async def _spawn(self, program: Program) -> asyncio.subprocess.Process:
        with self.log_path(program.name).open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *program.argv,
                    env={**os.environ, **program.env, _MARK: self._mark(program)},
                    cwd=program.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as err:
                raise StackFailed(f"{program.name} cannot be started: {err}") from err
        self._processes[program.name] = process
        log.info("program_started", program=program.name, pid=process.pid)
        return process

    async def _became_ready(self, program: Program, process: asyncio.subprocess.Process) -> bool:
        """False if it ended first.

        Late at its first start, it fails the stack; late later, it is killed and tried again.
        """
        ended = asyncio.create_task(process.wait())
        deadline_s = time.monotonic() + program.ready_s
        try:
            while (missing := await _missing(program, ended)) is not None and not ended.done():
                if time.monotonic() > deadline_s:
                    late = f"{program.name} was not ready after {program.ready_s:g} s: {missing}"
                    if self.restarts[program.name] == 0:
                        raise StackFailed(f"{late}; {self._tail(program.name)}")
                    log.error("program_late", program=program.name, missing=missing)
                    process.kill()
                await asyncio.wait({ended}, timeout=_POLL_S)
            if ended.done():
                return False
        finally:
            await end(ended)
        self._up[program.name].set()
        return True

    async def _stop(self, program: Program) -> None:
        """SIGTERM to the program alone, which drains its own children; SIGKILL to what is left."""
        process = self._processes[program.name]
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), program.stop_s)
            except TimeoutError:
                log.warning("program_killed", program=program.name, after_s=program.stop_s)
        self._sweep(program)
        await process.wait()
        log.info("program_stopped", program=program.name)

    def _sweep(self, program: Program) -> None:
        """Kill whatever the program started, also what took a session of its own, as ranks do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[program.name].pid, signal.SIGKILL)
        kill_marked(_MARK, self._mark(program))

    def _mark(self, program: Program) -> str:
        return f"{self._id}/{program.name}"

    def _tail(self, name: str) -> str:
        path = self.log_path(name)
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"the end of {path}:\n" + "\n".join(lines)


class LogTails:
    """New lines of the programs' log files; a program never waits for whoever reads them."""

    def __init__(self, log_dir: Path, names: Sequence[str]) -> None:
        self._paths = {name: log_dir / f"{name}.log" for name in names}
        self._offsets = {name: _size(path) for name, path in self._paths.items()}

    async def follow(self, on_line: OnLine) -> None:
        while True:
            self.emit(on_line)
            await asyncio.sleep(_POLL_S)

    def emit(self, on_line: OnLine) -> None:
        for name, path in self._paths.items():
            if _size(path) == self._offsets[name]:
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                complete, newline, _ = file.read().rpartition(b"\n")
            self._offsets[name] += len(complete) + len(newline)
            for line in complete.splitlines():
                on_line(name, line.decode(errors="replace"))


def _check_ports(groups: Sequence[Sequence[Program]]) -> None:
    """A stranger on a port would answer for the program, and look ready."""
    for program in (program for group in groups for program in group):
        if program.port is not None and port_in_use("127.0.0.1", program.port):
            raise StackFailed(
                f"{program.name} cannot be started: port {program.port} on 127.0.0.1 is in use."
            )


async def _missing(program: Program, ended: asyncio.Task[int]) -> str | None:
    if program.ready is not None:
        return await program.ready()
    await asyncio.wait({ended}, timeout=_SETTLE_S)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
