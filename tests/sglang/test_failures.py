"""A real server that is killed or stops: what runs goes on, and the proven version is back."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.launch import MARK
from services.rollout.engine.sglang.spec import ServerSpec
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import CHECKPOINT, World, variant

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("versions")
    server = ServerSpec(
        checkpoint=str(CHECKPOINT.absolute()),
        python=sglang_python,
        log_file=str(folder / "server.log"),
        update_deadline_s=15.0,
        stream_interval=4,
    )
    spec = EngineSpec(Architecture.load(CHECKPOINT), 16, 256, False, 1, server=server)
    async with running_engine(spec) as engine:
        mark = processes_of(engine.pid)[0].environ()[MARK]
        yield World(engine, folder)
    assert not marked_with(mark)


def processes_of(child_pid: int) -> list[psutil.Process]:
    """The server's processes, below the engine child."""
    return psutil.Process(child_pid).children(recursive=True)


def marked_with(mark: str) -> list[psutil.Process]:
    """Processes of this engine's servers, wherever they hang; other engines have other marks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def test_a_server_killed_in_mid_generation_is_replaced_and_the_group_finished(
    world: World,
) -> None:
    good = await world.activate(variant(0))
    running = asyncio.create_task(
        world.engine.generate(world.request(samples=4, tokens=100), timeout_s=500)
    )
    await world.until_running(4)
    psutil.Process(world.engine.pid).children()[0].kill()
    for one in await running:
        assert one.version_spans == [(good.version, 100)]
        world.check(one)


async def test_a_server_that_stops_is_replaced_and_takes_the_next_update(world: World) -> None:
    """An update that comes meanwhile waits for the guard; see test_mid_update for one under way."""
    good = await world.activate(variant(0))
    child = psutil.Process(world.engine.pid)
    stopped = child.children()[0]
    for process in processes_of(world.engine.pid):
        process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(300):
        while stopped in child.children():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    new = await world.activate(variant(1))
    assert new.version > good.version
    for one in await world.engine.generate(world.request(samples=2, tokens=8), timeout_s=500):
        assert one.version_spans == [(new.version, 8)]
        world.check(one)
