"""A real SGLang server keeps the contract of engines: each transport, each dialect, attached."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import pytest_asyncio

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.checkpoint import first_tensors, write_folder
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.dialects import dialect_of
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec, TransportName
from services.rollout.engine.sglang.versions import config_of
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CHECKPOINT, World, pytestmark  # noqa: F401

TOKEN = "the-operators-key"


class Flavour(NamedTuple):
    """Which server, how weights reach it, and what it must turn out to speak."""

    transport: TransportName
    dialect: str = "session"
    is_fork: bool = False
    is_attached: bool = False


FLAVOURS = {
    "disk": Flavour("disk"),
    "tensor": Flavour("tensor"),
    "gloo": Flavour("gloo"),
    "fork": Flavour("gloo", dialect="post_process", is_fork=True),
    "attached": Flavour("disk", is_attached=True),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FLAVOURS)
async def world(
    request: pytest.FixtureRequest,
    sglang_python: str,
    sglang_fork: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("versions")
    flavour = FLAVOURS[request.param]
    arch = Architecture.load(CHECKPOINT)
    server = ServerSpec(
        checkpoint=str(CHECKPOINT.absolute()),
        python=sglang_python,
        transport=flavour.transport,
        log_file=str(folder / "server.log"),
    )
    spec = EngineSpec(arch, 16, 256, False, 1, server=server)
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if flavour.is_fork:
            patch.setenv("PYTHONPATH", str(sglang_fork))
        if flavour.is_attached:
            url = await stack.enter_async_context(somebody_elses(spec, folder / "model"))
            spec = replace(spec, server=replace(server, url=url, token=TOKEN))
        engine = await stack.enter_async_context(running_engine(spec))
        if not flavour.is_attached:
            url = url_below(engine.pid)
        client = SGLangClient(url)
        assert dialect_of(await client.endpoints()) == flavour.dialect
        await client.close()
        yield World(engine, folder, long=90)  # a server on a CPU samples 15 in a second


@asynccontextmanager
async def somebody_elses(spec: EngineSpec, model: Path) -> AsyncIterator[str]:
    """URL of a server that this test started, which wants a key for what changes it."""
    assert spec.server is not None
    config = config_of(spec, spec.server)
    write_folder(model, first_tensors(CHECKPOINT, spec.arch), config)
    guarded = replace(spec.server, extra_arguments=("--admin-api-key", TOKEN))
    server = Server(spec, guarded, log_file=model.parent / "attached.log")
    try:
        await server.start(model)
        yield server.client.url
    finally:
        await server.stop()


def url_below(pid: int) -> str:
    """Of the server that an engine child started: its command line names the port."""
    arguments = psutil.Process(pid).children()[0].cmdline()
    return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
