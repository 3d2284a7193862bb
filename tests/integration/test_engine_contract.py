"""The embedded engine keeps the contract of engines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CHECKPOINT, World, pytestmark  # noqa: F401


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("versions")
    spec = EngineSpec(Architecture.load(CHECKPOINT), 16, 256, False, 1)
    async with running_engine(spec) as engine:
        yield World(engine, folder)
