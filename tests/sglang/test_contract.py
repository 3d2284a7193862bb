"""A real SGLang server keeps the contract of engines, by each way that weights can travel."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.spec import ServerSpec, TransportName
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CHECKPOINT, World, pytestmark  # noqa: F401


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["disk", "tensor", "gloo"])
async def world(
    request: pytest.FixtureRequest, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("versions")
    transport: TransportName = request.param
    server = ServerSpec(
        checkpoint=str(CHECKPOINT.absolute()),
        python=sglang_python,
        transport=transport,
        log_file=str(folder / "server.log"),
    )
    spec = EngineSpec(Architecture.load(CHECKPOINT), 16, 256, False, 1, server=server)
    async with running_engine(spec) as engine:
        yield World(engine, folder)
