"""A real server that dies or stops in the middle of an update, at a moment that the test chooses.

The transport is where it happens. Nobody guards this server: the transaction alone brings the last
proven version back, on a fresh one.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.__main__ import started
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import Disk, Transport
from shared.errors import RemoteError
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import CHECKPOINT, World, variant
from tests.sglang.dense_world import DenseEngine
from tests.sglang.test_failures import marked_with

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MARK = "tandem-mid-update"


def signal_server(number: signal.Signals) -> None:
    """To its HTTP server and its scheduler alike."""
    processes = marked_with(MARK)
    assert len(processes) > 1
    for process in processes:
        process.send_signal(number)


class KilledInSession:
    """After the session was begun; the tensors meet nobody."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        signal_server(signal.SIGKILL)
        await Disk().send(client, folder, timeout_s=timeout_s)


class KilledInCall(Disk):
    """While the call to load is under way."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        signal_server(signal.SIGSTOP)
        sending = asyncio.create_task(super().send(client, folder, timeout_s=timeout_s))
        done, _ = await asyncio.wait({sending}, timeout=1)
        assert not done
        signal_server(signal.SIGKILL)
        await sending


class KilledWhenLoaded(Disk):
    """With the new weights in place and nothing proven."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        await super().send(client, folder, timeout_s=timeout_s)
        signal_server(signal.SIGKILL)


class StoppedBeforeCall(Disk):
    """It has no answer until the deadline, and none on the way back."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        signal_server(signal.SIGSTOP)
        await super().send(client, folder, timeout_s=timeout_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("versions")
    spec = ServerSpec(
        checkpoint=str(CHECKPOINT.absolute()), python=sglang_python, update_deadline_s=15.0
    )
    engine_spec = EngineSpec(Architecture.load(CHECKPOINT), 16, 256, False, 1, server=spec)
    server = Server(engine_spec, spec, log_file=folder / "server.log", mark=MARK)
    try:
        versions = await started(engine_spec, spec, server, folder)
        engine = DenseEngine(versions.engine, versions)
        yield World(engine, folder)  # type: ignore[arg-type]
    finally:
        await server.stop()
    assert not marked_with(MARK)


@pytest.mark.parametrize(
    "transport",
    [KilledInSession(), KilledInCall(), KilledWhenLoaded(), StoppedBeforeCall()],
    ids=lambda one: type(one).__name__,
)
async def test_an_update_that_the_server_does_not_survive_leaves_the_old_version_on_a_fresh_one(
    world: World, transport: Transport
) -> None:
    assert isinstance(world.engine, DenseEngine)
    versions = world.engine.versions
    good = await world.activate(variant(0))
    before = {process.pid for process in marked_with(MARK)}
    usual, versions.transport = versions.transport, transport
    try:
        with pytest.raises(RemoteError):
            await world.activate(variant(1))
    finally:
        versions.transport = usual
    assert before.isdisjoint(process.pid for process in marked_with(MARK))
    assert world.engine.policy_version == good.version
    for one in await world.generate(world.request(samples=2, tokens=8)):
        assert one.version_spans == [(good.version, 8)]
        world.check(one)
    new = await world.activate(variant(1))
    for one in await world.generate(world.request(samples=2, tokens=8)):
        assert one.version_spans == [(new.version, 8)]
        world.check(one)
