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
from shared.errors import RemoteError
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.protocol import CommitUpdate
from tests.engine_contract import CHECKPOINT, World, variant
from tests.integration.rollout_world import write_version

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


async def test_a_server_that_stops_around_an_update_is_replaced_and_what_serves_is_exact(
    world: World,
) -> None:
    good = await world.activate(variant(0))
    for process in processes_of(world.engine.pid):
        process.send_signal(signal.SIGSTOP)
    version = next(world.numbers)
    staged = world.folder / f"v{version}"
    write_version(staged, variant(1), version)
    world.stored[version] = variant(1)
    served = version
    try:  # refused, unless the guard has replaced the server before the update had its turn
        await world.engine.activate(staged, CommitUpdate(), timeout_s=500)
    except RemoteError:
        served = good.version
    assert world.engine.policy_version == served
    completions = await world.engine.generate(world.request(samples=2, tokens=8), timeout_s=500)
    for one in completions:
        assert one.version_spans == [(served, 8)]
        world.check(one)
