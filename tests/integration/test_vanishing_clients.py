"""Clients that go away in the middle of a call, on real sockets: jobs are as if they had stayed."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from tests.integration.test_trainer_api import Trainer, make_config, running
from tests.served import served


@dataclass
class Served:
    """The trainer's application behind a real port."""

    trainer: Trainer
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.trainer.http.get("/v1/jobs")).json()["jobs"]
        return found


@pytest_asyncio.fixture
async def server(
    tmp_path: Path, redis_url: str, redis: Redis, free_port: int
) -> AsyncIterator[Served]:
    async with (
        running(make_config(tmp_path, redis_url), tmp_path) as trainer,
        served(trainer.app, port=free_port, lifespan=False),
    ):
        yield Served(trainer, free_port)


def posted(path: str, document: Any = None, *, key: str = "k") -> bytes:
    body = b"" if document is None else json.dumps(document).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        f"Idempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def reset(writer: asyncio.StreamWriter) -> None:
    """Gone without a goodbye: a killed process, a pulled cable."""
    made = writer.get_extra_info("socket")
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_a_post_that_breaks_off_queues_nothing(server: Served) -> None:
    whole = posted("/v1/jobs", server.trainer.document())
    for cut in (10, whole.index(b"\r\n\r\n") + 2, len(whole) - 1):
        _, writer = await server.connect()
        writer.write(whole[:cut])
        await writer.drain()
        reset(writer)
    assert (await server.trainer.http.get("/healthz")).status_code == 200
    assert await server.jobs() == []


async def test_a_job_whose_client_never_heard_the_answer_is_there_once(server: Served) -> None:
    """It runs, and the same call again is told its id."""
    document = server.trainer.document()
    for _ in range(3):
        _, writer = await server.connect()
        writer.write(posted("/v1/jobs", document))
        await writer.drain()
        reset(writer)
    async with asyncio.timeout(60):
        while not (found := await server.jobs()):  # noqa: ASYNC110  another task's doing
            await asyncio.sleep(0.02)
    await server.trainer.until_state(found[0]["job_id"], "running")
    headers = {"Idempotency-Key": "k"}
    base = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=base) as http:
        posts = [http.post("/v1/jobs", json=document, headers=headers) for _ in range(4)]
        answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["job_id"] for answer in answers} == {found[0]["job_id"]}
    assert len(await server.jobs()) == 1


async def test_equal_posts_at_the_same_time_are_one_job(server: Served) -> None:
    headers, document = {"Idempotency-Key": "k"}, server.trainer.document()
    posts = [server.trainer.http.post("/v1/jobs", json=document, headers=headers) for _ in range(5)]
    answers = await asyncio.gather(*posts)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 200, 201]
    assert len({answer.json()["job_id"] for answer in answers}) == 1


@pytest.mark.parametrize(("action", "state"), [("pause", "paused"), ("cancel", "cancelled")])
async def test_what_was_asked_happens_though_nobody_waits_for_it(
    server: Served, action: str, state: str
) -> None:
    job_id = await server.trainer.submit()
    await server.trainer.until_state(job_id, "running")
    _, writer = await server.connect()
    writer.write(posted(f"/v1/jobs/{job_id}/{action}"))
    await writer.drain()
    reset(writer)
    await server.trainer.until_state(job_id, state)


async def test_event_streams_that_are_dropped_leave_nothing_behind(server: Served) -> None:
    """The job runs on; the streams' tasks and files end; who comes later misses no event."""
    job_id = await server.trainer.submit()
    await server.trainer.until_state(job_id, "running")
    events = server.trainer.root / "runs" / job_id / "events.jsonl"
    async with asyncio.timeout(60):
        while open_descriptors(events) == 0:  # noqa: ASYNC110  opened shortly after "running"
            await asyncio.sleep(0.02)
    by_the_job = open_descriptors(events)
    for _ in range(5):
        reader, writer = await server.connect()
        writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        async with asyncio.timeout(60):
            await reader.readuntil(b'"job_started"')
        reset(writer)
    async with asyncio.timeout(60):
        while open_descriptors(events) > by_the_job or streams_running():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    status = (await server.trainer.http.get(f"/v1/jobs/{job_id}")).json()
    assert (status["state"], status["error"]) == ("running", None)
    await server.trainer.http.post(f"/v1/jobs/{job_id}/cancel")
    await server.trainer.until_state(job_id, "cancelled")
    text = (await server.trainer.http.get(f"/v1/jobs/{job_id}/events")).text
    assert text.count("data: ") == len(events.read_text().splitlines()) + 1


async def test_scores_that_nobody_waits_for_cost_the_job_nothing(server: Served) -> None:
    job_id = await server.trainer.submit()
    asked = {"sequences": [[1, 2, 3]]}
    await server.trainer.until_ok("POST", "/v1/score", json=asked)
    _, writer = await server.connect()
    writer.write(posted("/v1/score", asked))
    await writer.drain()
    reset(writer)
    await server.trainer.until_ok("POST", "/v1/score", json=asked)
    assert (await server.trainer.http.get(f"/v1/jobs/{job_id}")).json()["state"] == "running"


def open_descriptors(path: Path) -> int:
    """Of this process, on that file."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink() == path
    return found


def streams_running() -> int:
    return sum("RequestResponseCycle" in str(task.get_coro()) for task in asyncio.all_tasks())
