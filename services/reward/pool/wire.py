"""How the service and its grading processes talk: frames on a socket, progress on a shared page.

A frame is a little-endian u32 length and msgpack. The page says which check a worker is in and
since when, so that the service can see a check that hangs without a message per check.
"""

import mmap
import os
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import Any, cast

import msgpack

_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<IIdd")
PAGE_BYTES = 64
MAX_FRAME_BYTES = 256 * 2**20


def encode(value: Any) -> bytes:
    body = cast(bytes, msgpack.packb(value, unicode_errors="replace"))
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            frames.append(msgpack.unpackb(memoryview(self._buffer)[_LENGTH.size : end]))
            self._buffer = self._buffer[end:]
        return frames


def receive(link: socket.socket) -> Any:
    """The next frame of a blocking socket; EOFError when the other side is gone."""
    return msgpack.unpackb(_exactly(link, _LENGTH.unpack(_exactly(link, _LENGTH.size))[0]))


def _exactly(link: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise EOFError("the service is gone")
        view = view[count:]
    return bytes(buffer)


@dataclass(frozen=True, slots=True)
class Progress:
    batch: int  # number of the batch the worker is in
    index: int  # the check within it
    started_s: float  # time.monotonic() of its start
    cpu_s: float  # CPU time the worker had used then


class ProgressPage:
    """One page of memory that a worker writes and the service reads."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PAGE_BYTES)

    def write(self, batch: int, index: int) -> None:
        _PROGRESS.pack_into(self._memory, 0, batch, index, time.monotonic(), time.process_time())

    def read(self) -> Progress:
        return Progress(*_PROGRESS.unpack_from(self._memory))

    def close(self) -> None:
        self._memory.close()


def new_page() -> int:
    """File descriptor of fresh shared memory; the caller closes it."""
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:  # noqa: PTH112, S108
        file.truncate(PAGE_BYTES)
        return os.dup(file.fileno())
