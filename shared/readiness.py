"""Questions to a program that starts: is it ready, and if not, what is missing?

Each check is one bounded attempt that answers None or the reason in words; who asks repeats it.
"""

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable

Ready = Callable[[], Awaitable[str | None]]

_ATTEMPT_S = 2.0


def http_ready(url: str) -> Ready:
    """Ready once GET answers 200; otherwise says what it answered, as /readyz names its reason."""
    parts = urllib.parse.urlsplit(url)
    path = parts.path or "/"
    ask = f"GET {path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode()

    async def check() -> str | None:
        answer = await _exchange(parts.hostname or "127.0.0.1", parts.port or 80, ask)
        if isinstance(answer, str):
            return f"GET {url}: {answer}"
        head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
        status = head.split(" ")[1] if " " in head else "no HTTP"
        return None if status == "200" else f"GET {url}: {status} {body[:200]}"

    return check


def port_ready(host: str, port: int) -> Ready:
    """Ready once something accepts connections."""

    async def check() -> str | None:
        answer = await _exchange(host, port, b"")
        return f"port {host}:{port}: {answer}" if isinstance(answer, str) else None

    return check


def broker_ready(host: str, port: int) -> Ready:
    """Ready once the broker has loaded its file and answers PING."""

    async def check() -> str | None:
        answer = await _exchange(host, port, b"PING\r\n", num_bytes=200)
        if isinstance(answer, bytes) and answer.startswith((b"+PONG", b"-NOAUTH")):
            return None
        return f"PING {host}:{port}: {answer if isinstance(answer, str) else answer.decode()}"

    return check


async def _exchange(
    host: str, port: int, request: bytes, *, num_bytes: int | None = None
) -> bytes | str:
    """What the peer answers (up to its end, or the first of `num_bytes`), or why it does not."""
    try:
        async with asyncio.timeout(_ATTEMPT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                if not request:
                    return b""
                return await reader.read(-1 if num_bytes is None else num_bytes)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer in {_ATTEMPT_S:g} s"
    except OSError as err:
        return err.strerror or str(err)
