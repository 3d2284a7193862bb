"""The service's handle on the zygote: have workers forked, and have them ended."""

import array
import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any, cast

import msgpack

from services.reward.pool.settings import PoolConfig
from services.reward.pool.wire import ProgressPage, new_page
from services.reward.pool.worker import Worker
from shared.errors import DeadlineExceeded, Fatal

LOAD_S = 30.0
ANSWER_S = 10.0
_MAX_PACKET_BYTES = 64 * 2**10
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Zygote:
    """Built by `start`. `on_failure` is called once, with the reason, when it can serve no more."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        on_failure: Callable[[str], None],
        folder: str,
    ) -> None:
        self._process = process
        self._folder = folder  # each worker's temporary files are in one of their own
        self._control = control
        self._on_failure = on_failure
        self._answers: dict[tuple[str, int], asyncio.Future[int]] = {}
        self._num_forks = 0
        self._failure: str | None = None
        self.is_warm = asyncio.Event()
        self._listening = asyncio.create_task(self._listen(), name="zygote")

    @classmethod
    async def start(cls, config: PoolConfig, on_failure: Callable[[str], None]) -> "Zygote":
        """Returns once the graders are loaded; raises `Fatal` when they cannot be."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.reward.pool.zygote"),
                *(str(os.getpid()), str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=os.environ | _ONE_THREAD,
            )
        zygote = cls(process, ours, on_failure, tempfile.mkdtemp(prefix="tandem-grading-"))
        settings = config.model_dump(include={"plug_ins", "memory_bytes"})
        settings["folder"] = zygote._folder
        try:
            loaded = zygote._answer_to("loaded", 0)
            await zygote._send(settings, [])
            await _within(LOAD_S, loaded, "the graders to load")
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def prepare(self) -> None:
        """Have the heavy graders loaded; `is_warm` follows after their first expressions."""
        loaded = self._answer_to("loaded", 0)
        await self._send({"do": "prepare"}, [])
        await _within(LOAD_S, loaded, "the graders for mathematics to load")

    async def fork(
        self,
        on_report: Callable[[Worker, list[Any]], None],
        on_death: Callable[[Worker], None],
    ) -> Worker:
        """A new worker, connected."""
        self._num_forks += 1
        answer = self._answer_to("forked", self._num_forks)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        page = new_page()
        try:
            worker = Worker(ProgressPage(page), on_report, on_death)
            command = {"do": "fork", "id": self._num_forks}
            await self._send(command, [theirs.fileno(), page])
            worker.pid = await _within(ANSWER_S, answer, "a grading process to be forked")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
        return worker

    async def end(self, worker: Worker) -> str:
        """Kill and reap a worker, whatever it is doing; how it ended."""
        worker.close()
        answer = self._answer_to("ended", worker.pid)
        await self._send({"do": "end", "id": worker.pid}, [])
        code = await _within(ANSWER_S, answer, f"grading process {worker.pid} to end")
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def close(self) -> None:
        """The control socket's end makes it kill its workers and leave."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._control.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _answer_to(self, event: str, number: int) -> "asyncio.Future[int]":
        if self._failure is not None:
            raise Fatal(self._failure)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[event, number] = answer
        return answer

    async def _send(self, command: dict[str, Any], descriptors: list[int]) -> None:
        body = cast(bytes, msgpack.packb(command))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    self._control.sendmsg([body], rights if descriptors else [])
                except BlockingIOError:  # its queue is full of commands
                    await asyncio.sleep(0.02)
                except ConnectionError as err:
                    raise Fatal("the process that forks graders is gone") from err
                else:
                    return

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while body := await loop.sock_recv(self._control, _MAX_PACKET_BYTES):
            message = cast(dict[str, Any], msgpack.unpackb(body))
            answer = self._answers.pop((message["event"], message["id"]), None)
            if message["event"] == "warm":
                self.is_warm.set()
            elif message["event"] == "failed":
                self._fail(message["reason"])
            elif answer is not None and not answer.done():
                answer.set_result(message["value"])
        self._fail("the process that forks graders is gone")

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Fatal(reason))
        self._on_failure(reason)


async def _within(seconds: float, answer: "asyncio.Future[int]", what: str) -> int:
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as err:
        raise DeadlineExceeded(what, seconds) from err
