"""A real broker per session, clean keys per test, free ports, no test's logging in another's."""

import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: Megatron compiles at import

import pytest
import pytest_asyncio
import structlog
from redis.asyncio import Redis

from shared.broker import broker, broker_url
from shared.process import die_with_parent, prepare_to_fork
from shared.process import free_port as _free_port
from shared.redis import create_redis


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that tests kill cannot tidy up: what they leave lies in pytest's own folder."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        changed.setattr(tempfile, "tempdir", None)  # read anew
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A command run in this process sets its level of logging: not for the tests after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real broker, which does not outlive the tests even if they are killed."""
    program = broker(tmp_path_factory.mktemp("broker"), _free_port(), appendfsync="no")
    assert program.port is not None
    prepare_to_fork()
    log = (tmp_path_factory.getbasetemp() / "broker.log").open("wb")
    with (
        log,
        subprocess.Popen(
            program.argv, stdout=log, stderr=log, preexec_fn=partial(die_with_parent, os.getpid())
        ) as process,
    ):
        _wait_for_port(program.port)
        yield broker_url(program.port)
        process.terminate()


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = create_redis(redis_url, process="tests")
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def free_port() -> int:
    return _free_port()


def _wait_for_port(port: int, within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s, f"no broker on port {port} after {within_s} s"
            time.sleep(0.02)
        else:
            return
