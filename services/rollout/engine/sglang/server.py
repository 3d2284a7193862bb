"""One SGLang server: started here and ended with us, or somebody else's that we attach to.

A server is up when it has generated a token and says that it is well, not when its port is open:
SGLang generates before it has warmed up, and calls itself unwell until then. One that we started is
known by a mark in its environment, so that its scheduler processes end with it.
"""

import asyncio
import contextlib
import time
import uuid
from pathlib import Path

import structlog

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang import reach
from services.rollout.engine.sglang.client import ServerRefused, SGLangClient
from services.rollout.engine.sglang.launch import MARK, interpreter_of, launch_of
from services.rollout.engine.sglang.router import RoutedClient, client_of
from services.rollout.engine.sglang.spec import ServerSpec
from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.process import die_with_parent, free_port, kill_marked, prepare_to_fork

log = structlog.get_logger()

_STOP_S = 10.0
_POLL_S = 0.25
_HEALTH_S = 20.0
_LOG_TAIL = 2000  # characters of the log that a failure shows


class ServerFailed(TandemError):
    """The server ended, or never came up; the text has the end of its log."""


class Server:
    """`restart(model)` gives a fresh server of a folder, where the server is ours."""

    def __init__(
        self, engine: EngineSpec, spec: ServerSpec, *, log_file: Path, mark: str | None = None
    ) -> None:
        self.spec = spec
        self.log_file = log_file
        self._mark = mark or uuid.uuid4().hex  # nobody else's
        self.client = SGLangClient(spec.url or "http://127.0.0.1:1", token=spec.token)
        self.is_here = self.is_ours  # it sees what is on this host
        self._engine = engine
        self._child: asyncio.subprocess.Process | None = None
        self._not_yet = ""  # why it is not up

    @property
    def is_ours(self) -> bool:
        return self.spec.url is None

    @property
    def has_ended(self) -> bool:
        return self._child is not None and self._child.returncode is not None

    async def start(self, model: Path) -> None:
        """Start or attach, and wait until it is up."""
        if self.is_ours:
            await self._spawn(model)
        await self._wait_until_up()

    async def restart(self, model: Path) -> None:
        """End whatever there is and start from `model`."""
        if not self.is_ours:
            raise ServerFailed(f"{self.client.url} is not ours to restart")
        await self.stop()
        await self.start(model)

    async def is_well(self) -> bool:
        if self.has_ended:
            return False
        try:
            await self.client.ask_health(timeout_s=_HEALTH_S)
        except (HttpFailed, ServerRefused) as err:
            log.warning("sglang_unwell", error=str(err))
            return False
        return True

    async def stop(self) -> None:
        """End a server of ours with all its processes; leave another's alone."""
        if self._child is not None:
            if self._child.returncode is None:
                self._child.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._child.wait(), _STOP_S)
            await asyncio.to_thread(kill_marked, MARK, self._mark)
            await self._child.wait()
            self._child = None
        await self.client.close()

    async def _spawn(self, model: Path) -> None:
        port = free_port()
        launch = launch_of(self._engine, self.spec, model=model, port=port, mark=self._mark)
        self.client = SGLangClient(f"http://127.0.0.1:{port}")
        prepare_to_fork()
        with self.log_file.open("ab") as output:
            self._child = await asyncio.create_subprocess_exec(
                interpreter_of(self.spec),
                *launch.arguments,
                env=launch.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )
        log.info("sglang_started", pid=self._child.pid, model=str(model), log=str(self.log_file))

    async def _wait_until_up(self) -> None:
        """Until it generates and is well; what runs at a given URL is asked anew what it is."""
        limit_s = self.spec.start_deadline_s
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s:
            if self.has_ended:
                raise ServerFailed(f"SGLang ended at its start: {self.log_tail()}")
            if await self._is_reached() and await self._is_up():
                seconds = time.monotonic() - began_s
                log.info("sglang_up", url=self.client.url, seconds=round(seconds, 1))
                return
            await asyncio.sleep(_POLL_S)
        what = f"SGLang at {self.client.url} to generate a token and be well ({self._not_yet})"
        raise DeadlineExceeded(what, limit_s)

    async def _is_reached(self) -> bool:
        if self.is_ours:
            return True
        await self.client.close()
        try:
            self.client = await client_of(self.client.url, self.spec.token)
            await self.client.go_on()  # an update that broke may have left it paused
        except (HttpFailed, ServerRefused) as err:
            self._not_yet = str(err)
            log.debug("sglang_not_reached", url=self.client.url, error=self._not_yet)
            return False
        if isinstance(self.client, RoutedClient) and self.spec.transport != "disk":
            raise ServerFailed(
                f"{self.client.url} is a router: its workers are updated from disk, "
                f"not by {self.spec.transport}"
            )
        self.is_here = await asyncio.to_thread(reach.is_here, self.client.url)
        if self.spec.transport == "tensor" and not self.is_here:
            raise ServerFailed(
                f"{self.client.url} is on another host, which cannot map this one's memory: "
                "transport = disk needs a folder that both see, gloo and nccl a network"
            )
        return True

    async def _is_up(self) -> bool:
        body = {
            "input_ids": [[0, 1]],
            "sampling_params": [{"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}],
        }
        try:
            answers = await self.client.generate(body, timeout_s=_HEALTH_S)
            await self.client.ask_health(timeout_s=_HEALTH_S)
        except TandemError as err:
            self._not_yet = str(err)
            log.debug("sglang_not_up_yet", error=self._not_yet)
            return False
        return len(answers[0]["output_ids"]) == 1

    def log_tail(self) -> str:
        return (
            self.log_file.read_text(errors="replace")[-_LOG_TAIL:] if self.log_file.exists() else ""
        )
