"""The service's side of its engine: starts the child, asks it, notices when it dies.

All a service knows of an engine is here: generate, score, trace, activate a staged version, pause,
stop. No tensor and no torch on this side.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import structlog

from services.rollout.engine.child import IDS_VARIABLE
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.sglang.launch import MARK
from services.rollout.engine.sglang.spec import python_path
from shared.channel import AsyncChannel, listening
from shared.errors import ChannelClosed, DeadlineExceeded, RemoteError
from shared.process import kill_marked
from shared.tasks import end
from shared.weights.protocol import CommitResult, CommitUpdate, GroupTransfer

log = structlog.get_logger()

START_S = 60.0
STOP_S = 5.0
SERVER_STOP_S = 20.0  # with an SGLang server below the child
CALL_S = 30.0

# Small tensors come and go at every step: give their memory back to the allocator, not the kernel.
_ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}


@dataclass(slots=True)
class EngineLoad:
    """What the child last said of itself."""

    running: int = 0
    waiting: int = 0
    tokens_sampled: int = 0


class Engine:
    """One running child. `died` is set when it ends without being asked to."""

    def __init__(self, spec: EngineSpec, channel: AsyncChannel, child: asyncio.subprocess.Process):
        self.spec = spec
        self.pid = child.pid
        self.load = EngineLoad()
        self.died = asyncio.Event()
        self.on_load: Callable[[EngineLoad], None] | None = None
        self.policy_version: int | None = None
        self.checksum: str | None = None
        self._channel = channel
        self._child = child
        self._numbers = itertools.count()
        self._stopping = False
        self._watching = asyncio.create_task(self._watch(), name="engine child")
        channel.on_event = self._heard

    async def generate(self, request: GroupRequest, *, timeout_s: float) -> list[Completion]:
        """All completions of a request; an update in `abort` mode may cut them short.

        A caller that gives up, or a deadline, ends the request in the child, too.
        """
        try:
            answer = await self._channel.request(
                "generate", request.to_payload(), timeout_s=timeout_s
            )
        except (DeadlineExceeded, asyncio.CancelledError):
            await self._abort(request.request_id)
            raise
        return [Completion.from_payload(payload) for payload in answer["completions"]]

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        policy_version: int | None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """policy_version, and logprobs as little-endian FP32 bytes of each sequence."""
        payload = {
            "sequences": [list(sequence) for sequence in sequences],
            "temperature": temperature,
            "policy_version": policy_version,
        }
        return await self._channel.request("score", payload, timeout_s=timeout_s)

    async def trace(self, request: bytes, *, timeout_s: float) -> bytes:
        """A packed `Traced` for a packed `TraceRequest`: states of given tokens."""
        answer = await self._channel.request("trace", {"request": request}, timeout_s=timeout_s)
        return cast(bytes, answer["traced"])

    async def receive(self, folder: Path, group: GroupTransfer) -> None:
        """Take the shards that `folder` lists as incoming from a process group, as its files.

        RemoteError if the engine cannot, or some member of the group did not come to its end.
        """
        payload = {"folder": str(folder), "group": group.model_dump_json()}
        timeout_s = group.deadline_s + CALL_S
        await self._channel.request("receive", payload, timeout_s=timeout_s)

    async def activate(
        self, folder: Path, commit: CommitUpdate, *, timeout_s: float
    ) -> CommitResult:
        """Serve the version staged in `folder`; RemoteError (WeightsCorrupt) leaves the old one."""
        result = await self._built("activate", folder, commit, timeout_s)
        self.policy_version, self.checksum = result.version, result.effective_checksum
        return result

    async def rehearse(
        self, folder: Path, commit: CommitUpdate, *, timeout_s: float
    ) -> CommitResult:
        """Do all that `activate` does but switch."""
        return await self._built("rehearse", folder, commit, timeout_s)

    async def _built(
        self, op: str, folder: Path, commit: CommitUpdate, timeout_s: float
    ) -> CommitResult:
        payload = {
            "folder": str(folder),
            "commit": commit.model_dump_json(),
            "asked_at_s": time.monotonic(),
        }
        answer = await self._channel.request(op, payload, timeout_s=timeout_s)
        return CommitResult.model_validate(answer)

    async def load_from(self, source: Path, policy_version: int, *, timeout_s: float) -> None:
        """Serve weights of this disk (`source` is absolute); RemoteError says what is wrong."""
        payload = {"source": str(source), "policy_version": policy_version}
        answer = await self._channel.request("load", payload, timeout_s=timeout_s)
        self.policy_version, self.checksum = policy_version, answer["checksum"]

    async def pause(self) -> None:
        await self._channel.request("pause", timeout_s=CALL_S)

    async def go_on(self) -> None:
        await self._channel.request("continue", timeout_s=CALL_S)

    async def spans(self, max_spans: int) -> dict[str, Any]:
        """Have the child record so many spans, or none any more; those since the last call."""
        payload = {"max_spans": max_spans}
        answer = await self._channel.request("spans", payload, timeout_s=CALL_S)
        return {**answer, "pid": self.pid}

    async def environment(self) -> dict[str, Any]:
        """Versions of the child's interpreter, and of its server if it has one."""
        return await self._channel.request("environment", timeout_s=CALL_S)

    def new_request_id(self) -> str:
        return f"request-{next(self._numbers)}"

    async def stop(self) -> None:
        """End the child; unanswered requests end with `ChannelClosed`."""
        self._stopping = True
        with contextlib.suppress(ChannelClosed, DeadlineExceeded):
            await self._channel.request("stop", timeout_s=STOP_S)
        await _wait_or_kill(self._child, _stop_limit_s(self.spec))
        await end(self._watching)

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(ChannelClosed, DeadlineExceeded):
            await self._channel.request("abort", {"request_id": request_id}, timeout_s=CALL_S)

    async def _watch(self) -> None:
        code = await self._child.wait()
        if not self._stopping:
            log.error("engine_died", pid=self.pid, exit_code=code)
            self.died.set()

    def _heard(self, event: str, payload: dict[str, Any]) -> None:
        if event == "stats":
            self.load = EngineLoad(**payload)
            if self.on_load is not None:
                self.on_load(self.load)


@contextlib.asynccontextmanager
async def running_engine(
    spec: EngineSpec, *, ids: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Engine]:
    """Start the child and wait until it is up; leaving ends it. Its records carry `ids`."""
    async with _scratch(spec) as scratch, listening() as listener:
        child = await asyncio.create_subprocess_exec(
            *_command(spec),
            listener.address,
            str(os.getpid()),
            *scratch,
            env={
                **os.environ,
                **_ALLOCATOR,
                **_environment(spec),
                IDS_VARIABLE: json.dumps(dict(ids)),
            },
        )
        try:
            channel = await _connected(listener.accept(START_S), child)
            await channel.request("start", spec.to_payload(), timeout_s=_start_limit_s(spec))
            engine = Engine(spec, channel, child)
        except RemoteError:
            await _wait_or_kill(child, _stop_limit_s(spec))  # it has said why, and ends itself
            raise
        except BaseException:
            await _wait_or_kill(child, 0.0)
            raise
        log.info("engine_started", pid=engine.pid)
        try:
            yield engine
        finally:
            await engine.stop()


@contextlib.asynccontextmanager
async def _scratch(spec: EngineSpec) -> AsyncIterator[list[str]]:
    """The folder of a server's child. However that ends, nothing of it is left: no file, and no
    process that carries the folder as its mark."""
    if spec.server is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="tandem-sglang-", ignore_cleanup_errors=True) as folder:
        try:
            yield [folder]
        finally:
            await asyncio.to_thread(kill_marked, MARK, folder)


async def _wait_or_kill(child: asyncio.subprocess.Process, limit_s: float) -> None:
    try:
        await asyncio.wait_for(child.wait(), limit_s)
    except TimeoutError:
        log.warning("engine_killed", pid=child.pid, after_s=limit_s)
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _stop_limit_s(spec: EngineSpec) -> float:
    return STOP_S if spec.server is None else SERVER_STOP_S


def _command(spec: EngineSpec) -> list[str]:
    """FileNotFoundError names an interpreter that is not there."""
    if spec.server is None:
        return [sys.executable, "-m", "services.rollout.engine.embedded_child"]
    python = spec.server.python or sys.executable
    if shutil.which(python) is None:
        raise FileNotFoundError(f"ROLLOUT_SGLANG__PYTHON: {python} is no interpreter on this host")
    return [python, "-m", "services.rollout.engine.sglang"]


def _environment(spec: EngineSpec) -> dict[str, str]:
    """The child of a server on the CPU imports SGLang, too, with what stands in for its kernels."""
    variables = {"OMP_NUM_THREADS": str(spec.num_threads)}
    if spec.server is not None and spec.server.platform == "cpu":
        variables["PYTHONPATH"] = python_path()
    return variables


def _start_limit_s(spec: EngineSpec) -> float:
    return START_S if spec.server is None else spec.server.start_deadline_s + START_S


async def _connected(
    accepting: Coroutine[Any, Any, AsyncChannel], child: asyncio.subprocess.Process
) -> AsyncChannel:
    """The child's channel; a child that ends before it connects is not waited for."""
    arrival = asyncio.ensure_future(accepting)
    ended = asyncio.create_task(child.wait())
    try:
        await asyncio.wait({arrival, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done():
            raise ChannelClosed(f"the engine child ended with code {child.returncode} at its start")
        return arrival.result()
    finally:
        arrival.cancel()
        ended.cancel()
