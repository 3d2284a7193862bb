"""The one HTTP client, and a fast download for weight shards.

Retries live here and nowhere else, with jitter and a limit: a request that may be repeated is tried
again when no answer came or the server said "not now"; one that may not be is tried again only when
no connection was made.
"""

import http.client
import ssl
import threading
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Self, cast

import httpx
import stamina
import xxhash

from shared.errors import HttpFailed

_NOT_NOW = (502, 503, 504)
_EXCERPT_CHARS = 500
_MAX_ERROR_CHARS = 2**16  # a refused job lists each wrong key
_CHUNK_BYTES = 2**21
# A server closes a connection after 5 s without a request (uvicorn's default): never race with it.
_IDLE_S = 2.0
MAX_CONNECTIONS = 100


class HttpClient:
    """JSON over HTTP with deadlines. Raises `HttpFailed`, which names method, url, status, body."""

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        attempts: int = 4,
        token: str | None = None,
        max_connections: int | None = MAX_CONNECTIONS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._attempts = attempts
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(
                max_connections=max_connections,
                max_keepalive_connections=20,
                keepalive_expiry=_IDLE_S,
            ),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def get(
        self, url: str, *, params: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        return await self.request("GET", url, params=params, timeout_s=timeout_s, idempotent=True)

    async def post(
        self,
        url: str,
        json: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Any:
        """`idempotent` says that doing it twice is the same as once."""
        return await self.request(
            "POST", url, json=json, headers=headers, timeout_s=timeout_s, idempotent=idempotent
        )

    async def post_for_lines(self, url: str, json: Any, *, timeout_s: float) -> AsyncIterator[str]:
        """Lines of an answer as they come; `timeout_s` bounds the wait for each. Never repeated."""
        try:
            async with self._client.stream("POST", url, json=json, timeout=timeout_s) as answer:
                if answer.is_error:
                    body = (await answer.aread()).decode(errors="replace")
                    raise HttpFailed("POST", url, answer.status_code, body[:_MAX_ERROR_CHARS])
                async for line in answer.aiter_lines():
                    yield line
        except httpx.TransportError as err:
            raise HttpFailed("POST", url, None, f"{type(err).__name__}: {err}") from err

    async def delete(self, url: str, *, timeout_s: float | None = None) -> Any:
        return await self.request("DELETE", url, timeout_s=timeout_s, idempotent=True)

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Any:
        """The decoded JSON answer; bytes if it is not JSON; None if it is empty."""

        def may_retry(err: Exception) -> bool:
            cause = err.__cause__
            if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
                return True
            return idempotent and (
                isinstance(cause, httpx.TransportError)
                or (isinstance(err, HttpFailed) and err.status in _NOT_NOW)
            )

        async for attempt in stamina.retry_context(
            on=may_retry, attempts=self._attempts, timeout=None, wait_initial=0.1, wait_max=2.0
        ):
            with attempt:
                return await self._once(method, url, json, content, params, headers, timeout_s)
        raise AssertionError("a retry context ends by returning or raising")

    async def _once(
        self,
        method: str,
        url: str,
        json: Any,
        content: bytes | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            answer = await self._client.request(
                method,
                url,
                json=json,
                content=content,
                params=params,
                headers=headers,
                timeout=timeout,
            )
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as err:
            is_late = isinstance(err, httpx.ReadTimeout)
            body = f"{type(err).__name__}: {err}"
            raise HttpFailed(method, url, None, body, is_late=is_late) from err
        if answer.is_error:
            raise HttpFailed(method, url, answer.status_code, answer.text[:_MAX_ERROR_CHARS])
        try:
            return _decoded(answer)
        except (ValueError, RecursionError) as err:
            why = "nested too deeply" if isinstance(err, RecursionError) else err
            raise HttpFailed(method, url, answer.status_code, f"no JSON: {why}") from err


def _decoded(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    if answer.headers.get("content-type", "").startswith("application/json"):
        return answer.json()
    return answer.content


@dataclass(frozen=True, slots=True)
class Downloaded:
    num_bytes: int  # fetched by this call
    xxh3_128: str  # of the whole target, the part before `offset` included


def download(
    url: str,
    target: Path | bytearray | memoryview,
    *,
    expected_bytes: int,
    offset: int = 0,
    timeout_s: float = 30.0,
    token: str | None = None,
    stopped: threading.Event | None = None,
    arrived: Callable[[int], None] = lambda _: None,
) -> Downloaded:
    """Fetch a file of `expected_bytes` into `target` and hash it on the way (blocking).

    `offset` resumes: bytes before it are in `target` already. A file that exists is written over in
    place, for new pages cost more than the network, and gets its size in the end. `arrived` is told
    after each part how many bytes of the target are right. `timeout_s` bounds each wait for the
    server. Raises `HttpFailed`, also when the server sends fewer or more bytes than expected. Once
    `stopped` is set nothing is written to a file any more: it may be another download's by then.
    """
    if not 0 <= offset < expected_bytes:
        raise ValueError(f"offset {offset} outside of the {expected_bytes} bytes of {url}")
    connection, request_path = _connect(url, timeout_s)
    try:
        answer = _open(connection, url, request_path, offset, token)
        length = answer.length
        if length is not None and length != expected_bytes - offset:
            body = f"{length} bytes offered, {expected_bytes - offset} expected"
            raise HttpFailed("GET", url, answer.status, body)
        if isinstance(target, Path):
            return _into_file(answer, url, target, expected_bytes, offset, stopped, arrived)
        return _into_memory(answer, url, memoryview(target).cast("B"), expected_bytes, offset)
    except (OSError, http.client.HTTPException) as err:
        raise HttpFailed("GET", url, None, f"{type(err).__name__}: {err}") from err
    finally:
        connection.close()


def _connect(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ValueError(f"cannot download {url!r}: not an http address")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    return connection, urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))


def _open(
    connection: http.client.HTTPConnection, url: str, path: str, offset: int, token: str | None
) -> http.client.HTTPResponse:
    headers = {"Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    wanted = 206 if offset else 200
    if answer.status != wanted:
        excerpt = answer.read(_EXCERPT_CHARS).decode(errors="replace")
        raise HttpFailed("GET", url, answer.status, excerpt or f"{wanted} expected")
    return answer


def _into_memory(
    answer: http.client.HTTPResponse, url: str, view: memoryview, expected: int, offset: int
) -> Downloaded:
    if len(view) < expected:
        raise ValueError(f"a buffer of {len(view)} bytes cannot hold {expected}")
    digest = xxhash.xxh3_128(view[:offset])
    at = offset
    while at < expected:
        count = answer.readinto(view[at : min(at + _CHUNK_BYTES, expected)])
        if count == 0:
            raise HttpFailed("GET", url, answer.status, f"ended at byte {at} of {expected}")
        digest.update(view[at : at + count])
        at += count
    return Downloaded(expected - offset, digest.hexdigest())


def _into_file(
    answer: http.client.HTTPResponse,
    url: str,
    path: Path,
    expected: int,
    offset: int,
    stopped: threading.Event | None,
    arrived: Callable[[int], None],
) -> Downloaded:
    digest = xxhash.xxh3_128()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        for begin in range(0, offset, _CHUNK_BYTES):
            part = file.read(min(_CHUNK_BYTES, offset - begin))
            digest.update(cast(bytes, part))
        at = offset
        while at < expected:
            count = answer.readinto(chunk[: min(_CHUNK_BYTES, expected - at)])
            if count == 0:
                raise HttpFailed("GET", url, answer.status, f"ended at byte {at} of {expected}")
            if stopped is not None and stopped.is_set():
                raise HttpFailed("GET", url, answer.status, f"given up at byte {at} of {expected}")
            digest.update(chunk[:count])
            try:
                _write_all(file, chunk[:count])
            except OSError as err:  # ours, not the source's
                body = f"cannot write {path}: {err.strerror}"
                raise HttpFailed("GET", url, answer.status, body) from err
            at += count
            arrived(at)
        file.truncate(expected)
    return Downloaded(expected - offset, digest.hexdigest())


def _write_all(file: RawIOBase, data: memoryview) -> None:
    """An unbuffered file takes what the disk has room for, and says so only at the next write."""
    while data:
        data = data[file.write(data) :]
