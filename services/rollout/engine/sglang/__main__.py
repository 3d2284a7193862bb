"""The engine child of an SGLang server.

`python -m services.rollout.engine.sglang ADDRESS PARENT FOLDER`: the folder is the service's to
remove, and its path the mark of the server's processes.

Requests come over the service's channel and are answered by tasks, since it is the server that
works. It runs under the interpreter that has SGLang, because tensors are handed over in its form.
"""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from services.rollout.engine.child import begin, told_spans
from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.sglang.checkpoint import first_tensors, write_folder
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import identify
from services.rollout.engine.sglang.launch import check_installed
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import transport_of
from services.rollout.engine.sglang.versions import FIRST, Versions, config_of
from services.rollout.engine.weights import receive_version
from shared.channel import Request, SyncChannel
from shared.environment import process_facts
from shared.errors import ChannelClosed
from shared.spans import span
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitUpdate, GroupTransfer

log = structlog.get_logger()

_STATS_S = 0.5
_GUARD_S = 5.0
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class _Child:
    """Channel on one side, server on the other."""

    def __init__(self, channel: SyncChannel, engine: SGLangEngine, versions: Versions) -> None:
        self._channel = channel
        self._engine = engine
        self._versions = versions
        self._changing = asyncio.Lock()  # an update, a recovery or a pause; one at a time
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._operations: dict[str, Handler] = {
            "generate": self._generate,
            "abort": self._abort,
            "score": self._score,
            "trace": self._trace,
            "receive": self._receive,
            "activate": self._activate,
            "pause": self._pause,
            "continue": self._continue,
            "spans": self._spans,
            "environment": self._environment,
            "stop": self._end,
        }

    async def run(self, requests: "asyncio.Queue[Request | None]") -> None:
        """Serve until told to stop, or until the service or the server is gone for good."""
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._notify_load()), group.create_task(self._guard())]
            while not self._stop.is_set():
                request = await requests.get()
                if request is None:
                    break
                task = asyncio.create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if request.op == "stop":
                    await task
            for one in loops:
                one.cancel()
        for task in self._tasks:
            task.cancel()

    async def _answer(self, request: Request) -> None:
        try:
            payload = await self._operations[request.op](request.payload)
        except Exception as err:  # noqa: BLE001  whoever asked is told; the engine goes on
            log.warning("operation_failed", op=request.op, error=repr(err))
            self._channel.fail(request.id, err)
        else:
            self._channel.reply(request.id, payload)

    async def _generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        request = GroupRequest.from_payload(payload)
        with span("generate", "requests", samples=len(request.samples)):
            completions = await self._engine.generate(request)
        return {"completions": [one.to_payload() for one in completions]}

    async def _abort(self, payload: dict[str, Any]) -> dict[str, Any]:
        await self._engine.abort(payload["request_id"])
        return {}

    async def _score(self, payload: dict[str, Any]) -> dict[str, Any]:
        with span("score", "requests", sequences=len(payload["sequences"])):
            version, scores = await self._engine.score(
                payload["sequences"], payload["temperature"], payload["policy_version"]
            )
        logprobs = [one.astype("<f4").tobytes() for one in scores]
        return {"policy_version": version, "logprobs": logprobs}

    async def _trace(self, payload: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("an SGLang server tells log-probabilities, no hidden states")

    async def _receive(self, payload: dict[str, Any]) -> dict[str, Any]:
        group = GroupTransfer.model_validate_json(payload["group"])
        await asyncio.to_thread(receive_version, Path(payload["folder"]), group)
        return {}

    async def _activate(self, payload: dict[str, Any]) -> dict[str, Any]:
        folder = Path(payload["folder"])
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        commit = CommitUpdate.model_validate_json(payload["commit"])
        async with self._changing:
            with span("activate", "updates", policy_version=manifest.policy_version):
                return await self._versions.activate(
                    manifest, folder, commit, asked_at_s=payload["asked_at_s"]
                )

    async def _pause(self, payload: dict[str, Any]) -> dict[str, Any]:
        async with self._changing:
            await self._engine.pause()
        return {}

    async def _continue(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._engine.go_on()
        return {}

    async def _spans(self, payload: dict[str, Any]) -> dict[str, Any]:
        return told_spans(payload["max_spans"])

    async def _environment(self, payload: dict[str, Any]) -> dict[str, Any]:
        info = await self._engine.server.client.info()
        return {**process_facts(), "server": {"version": str(info.get("version", "unknown"))}}

    async def _end(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._stop.set()
        return {}

    async def _notify_load(self) -> None:
        while True:
            load = {
                "running": self._engine.num_running,
                "waiting": self._engine.num_waiting,
                "tokens_sampled": self._engine.tokens_sampled,
            }
            self._channel.notify("stats", load)
            await asyncio.sleep(_STATS_S)

    async def _guard(self) -> None:
        """A server that died or does not answer is replaced by one of the last good version."""
        while True:
            await asyncio.sleep(_GUARD_S)
            async with self._changing:
                if await self._engine.server.is_well() and await self._versions.is_served():
                    self._engine.open_gate()  # a call that was lost may have closed it
                    continue
                self._versions.restarts.check()
                log.warning("sglang_lost", log_tail=self._engine.server.log_tail()[-500:])
                await self._versions.recover()


async def serve(channel: SyncChannel, first: Request, folder: Path) -> None:
    """Start the server that the request describes, answer it, then everything else."""
    spec = EngineSpec.from_payload(first.payload)
    assert spec.server is not None
    log_file = Path(spec.server.log_file or folder / "server.log")
    server = Server(spec, spec.server, log_file=log_file, mark=str(folder))
    try:
        try:
            check_installed(spec.server)
            versions = await started(spec, spec.server, server, folder)
        except Exception as err:
            channel.fail(first.id, err)
            raise SystemExit(1) from err
        channel.reply(first.id)
        await _Child(channel, versions.engine, versions).run(_arriving(channel))
    finally:
        await server.stop()


async def started(
    spec: EngineSpec, server_spec: ServerSpec, server: Server, folder: Path
) -> Versions:
    """The server with its own first weights up, or attached to, and what replaces them."""
    transport = transport_of(server_spec.transport)
    if server.is_ours:
        tensors = await asyncio.to_thread(first_tensors, Path(server_spec.checkpoint), spec.arch)
        config = config_of(spec, server_spec)
        await asyncio.to_thread(write_folder, folder / FIRST, tensors, config)
    await server.start(folder / FIRST)
    (architecture,) = config_of(spec, server_spec)["architectures"]
    served = await identify(server, architecture=architecture)
    engine = SGLangEngine(spec, server)
    return Versions(engine, server_spec, folder=folder, served=served, transport=transport)


def _arriving(channel: SyncChannel) -> "asyncio.Queue[Request | None]":
    """Requests as they come, read by a thread; None when the service is gone."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[Request | None] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(requests.put_nowait, channel.recv())
        except (ChannelClosed, RuntimeError):  # RuntimeError: the loop has ended
            if not loop.is_closed():
                loop.call_soon_threadsafe(requests.put_nowait, None)

    threading.Thread(target=read, name="channel", daemon=True).start()
    return requests


def main(argv: list[str]) -> None:
    *who, folder = argv
    channel, first = begin(who)
    asyncio.run(serve(channel, first, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
