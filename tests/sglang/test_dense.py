"""A small dense model on a real server keeps the contract of engines, whatever the architecture.

Its cache holds keys and values, so a prefix that is kept over an update is a real fault here.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.checkpoint import write_folder
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.dialects import dialect_of
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import Served
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import Disk
from services.rollout.engine.sglang.versions import FIRST
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CHECKPOINT, World, pytestmark  # noqa: F401
from tests.sglang.dense_world import CONFIG, DenseEngine, DenseModel, DenseVersions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("dense")
    write_folder(folder / FIRST, DenseModel().variant(0), CONFIG.to_dict())
    spec = ServerSpec(checkpoint=str(folder / FIRST), python=sglang_python, max_total_tokens=8192)
    # Of the architecture the vocabulary alone is looked at.
    engine_spec = EngineSpec(Architecture.load(CHECKPOINT), 16, 256, False, 1, server=spec)
    server = Server(engine_spec, spec, log_file=folder / "server.log")
    try:
        await server.start(folder / FIRST)
        engine = SGLangEngine(engine_spec, server)
        served = Served(dialect_of(await server.client.endpoints()))
        versions = DenseVersions(engine, spec, folder=folder, served=served, transport=Disk())
        answering = DenseEngine(engine, versions)
        yield World(answering, folder, DenseModel())  # type: ignore[arg-type]
    finally:
        await server.stop()


class KeepsPrefixes(Disk):
    """Has the server load and keep what it has cached."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        body = {"model_path": str(folder), "flush_cache": False, "abort_all_requests": False}
        await client.change("/update_weights_from_disk", body, timeout_s=timeout_s)


async def test_a_prefix_that_the_server_keeps_is_seen_and_a_fresh_server_has_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.activate(world.model.variant(0))
    engine = world.engine
    assert isinstance(engine, DenseEngine)

    async def flush(client: SGLangClient) -> None:
        """Say that it is done."""

    with monkeypatch.context() as patched:
        patched.setattr(SGLangClient, "flush", flush)
        patched.setattr(engine.versions, "transport", KeepsPrefixes())
        restarted: list[Path] = []
        restart = Server.restart

        async def note_restart(server: Server, model: Path) -> None:
            restarted.append(model)
            await restart(server, model)

        patched.setattr(Server, "restart", note_restart)
        other = await world.activate(world.model.variant(1))
        assert [model.name for model in restarted] == [f"v{other.version:08d}"]
    for one in await world.generate(world.request(samples=2, tokens=8)):
        assert one.version_spans == [(other.version, 8)]
        world.check(one)
