"""How a service's event loop talks with its synchronous engine or rank child.

    parent (asyncio)                                child (plain loop)
    listening() -> address ──environment──────────> SyncChannel.connect(address)
    request(op, payload) ──{id, op, payload}──────> recv() -> Request ─┐
              <──────────────{id, payload | error}─ reply() or fail() <┘
    on_event(name, payload) <──{event, payload}──── notify()

The socket is a Unix one in a private folder. When either side goes away, the other's pending calls
end with `ChannelClosed`; nobody waits for the dead.
"""

import asyncio
import contextlib
import itertools
import select
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from shared.errors import ChannelClosed, DeadlineExceeded
from shared.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    body_length,
    error_fields,
    error_from,
    pack_frame,
    unpack_frame,
)
from shared.tasks import end, take

log = structlog.get_logger()
OnEvent = Callable[[str, dict[str, Any]], None]

_BUFFER_BYTES = 4 * 2**20
_MAX_EARLY_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class Request:
    id: int
    op: str
    payload: dict[str, Any]


class Listener:
    """Where one or more children connect; `address` goes into their environment."""

    def __init__(self, address: str, arrivals: "asyncio.Queue[AsyncChannel]") -> None:
        self.address = address
        self._arrivals = arrivals

    async def accept(self, timeout_s: float) -> "AsyncChannel":
        try:
            return await take(self._arrivals, timeout_s)
        except TimeoutError as err:
            raise DeadlineExceeded(f"a child to connect to {self.address}", timeout_s) from err


@contextlib.asynccontextmanager
async def listening(max_frame_bytes: int = MAX_FRAME_BYTES) -> AsyncIterator[Listener]:
    """Listen on a socket that only this user can reach; leaving closes it and every channel."""
    arrivals: asyncio.Queue[AsyncChannel] = asyncio.Queue()
    channels: list[AsyncChannel] = []

    def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = AsyncChannel(reader, writer, max_frame_bytes)
        channels.append(channel)
        arrivals.put_nowait(channel)

    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        address = str(Path(folder) / "engine.sock")
        server = await asyncio.start_unix_server(arrived, address, limit=_BUFFER_BYTES)
        try:
            yield Listener(address, arrivals)
        finally:
            server.close()
            for channel in channels:
                await channel.close()


class AsyncChannel:
    """The parent's side. Requests may overlap; answers are matched by id."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_frame_bytes: int
    ) -> None:
        self.closed = asyncio.Event()
        self._on_event: OnEvent | None = None
        self._early_events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_EARLY_EVENTS)
        self._writer = writer
        self._max_frame_bytes = max_frame_bytes
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read(reader), name="channel")

    @property
    def on_event(self) -> OnEvent | None:
        """Called with (name, payload) of each event; those that came before it was set first."""
        return self._on_event

    @on_event.setter
    def on_event(self, callback: OnEvent) -> None:
        self._on_event = callback
        while self._early_events:
            callback(*self._early_events.popleft())

    async def request(
        self, op: str, payload: dict[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """Ask the child and wait for its answer; its error is raised here.

        Raises `ChannelClosed` when the child is gone, `DeadlineExceeded` after `timeout_s`. A late
        answer is dropped.
        """
        if self.closed.is_set():
            raise ChannelClosed(f"{op}: the child is gone")
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"id": number, "op": op, "payload": payload or {}})
                return await answer
        except TimeoutError as err:
            if answer.done() and not answer.cancelled():  # the child's own TimeoutError
                raise
            raise DeadlineExceeded(f"the child to answer {op}", timeout_s) from err
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        await end(self._reading)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _send(self, message: dict[str, Any]) -> None:
        header, body = pack_frame(message, self._max_frame_bytes)
        try:
            self._writer.write(header)
            self._writer.write(body)
            await self._writer.drain()
        except OSError as err:
            raise ChannelClosed(f"the child is gone: {err}") from err

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "the child closed the channel"
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                body = await reader.readexactly(body_length(header, self._max_frame_bytes))
                self._dispatch(unpack_frame(body))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ChannelClosed as err:
            reason = str(err)
        finally:
            self.closed.set()
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(ChannelClosed(reason))

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "event" in message:
            if self._on_event is None:
                self._early_events.append((message["event"], message["payload"]))
            else:
                self._on_event(message["event"], message["payload"])
            return
        answer = self._pending.get(message["id"])
        if answer is None or answer.done():
            log.debug("late_answer_dropped", request=message["id"])
        elif "error" in message:
            answer.set_exception(error_from(message["error"]))
        else:
            answer.set_result(message["payload"])


class SyncChannel:
    """The child's side: blocking, for a plain loop. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._sock = sock
        self._max_frame_bytes = max_frame_bytes
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, address: str, *, timeout_s: float = 10.0) -> Self:
        deadline_s = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(address)
            except (FileNotFoundError, ConnectionRefusedError) as err:
                sock.close()
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded(f"the parent to listen on {address}", timeout_s) from err
                time.sleep(0.05)
            else:
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
                return cls(sock)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether `recv` would not wait (also when the parent is gone)."""
        readable, _, _ = select.select([self._sock], [], [], timeout_s)
        return bool(readable)

    def recv(self, timeout_s: float | None = None) -> Request | None:
        """The next request; None when none came in `timeout_s`. Raises `ChannelClosed`."""
        if timeout_s is not None and not self.poll(timeout_s):
            return None
        header = self._read(HEADER.size)
        message = unpack_frame(self._read(body_length(header, self._max_frame_bytes)))
        return Request(message["id"], message["op"], message["payload"])

    def reply(self, request_id: int, payload: dict[str, Any] | None = None) -> None:
        self._send({"id": request_id, "payload": payload or {}})

    def fail(self, request_id: int, error: BaseException) -> None:
        self._send({"id": request_id, "error": error_fields(error)})

    def notify(self, event: str, payload: dict[str, Any] | None = None) -> None:
        """Tell the parent something it did not ask for."""
        self._send({"event": event, "payload": payload or {}})

    def close(self) -> None:
        self._sock.close()

    def _send(self, message: dict[str, Any]) -> None:
        header, body = pack_frame(message, self._max_frame_bytes)
        try:
            with self._sending:
                self._sock.sendall(header)
                self._sock.sendall(body)
        except OSError as err:
            raise ChannelClosed(f"the parent is gone: {err}") from err

    def _read(self, num_bytes: int) -> memoryview:
        view = memoryview(bytearray(num_bytes))
        at = 0
        while at < num_bytes:
            try:
                count = self._sock.recv_into(view[at:])
            except OSError as err:
                raise ChannelClosed(f"the parent is gone: {err}") from err
            if count == 0:
                raise ChannelClosed("the parent closed the channel")
            at += count
        return view
