"""A real router in front of two servers: each is updated and proven, and both sample.

The servers are the small ones that answer like SGLang, so that what each was told can be seen.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.dialects import dialect_of
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import Served
from services.rollout.engine.sglang.router import RoutedClient
from services.rollout.engine.sglang.server import Server, ServerFailed
from services.rollout.engine.sglang.spec import ServerSpec, python_path
from services.rollout.engine.sglang.transports import Disk
from services.rollout.engine.sglang.versions import Versions
from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.architecture import Architecture
from shared.process import free_port
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer, serving
from tests.integration.sglang_world import NEW, OLD, Attached

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@asynccontextmanager
async def routing(python: str, workers: list[str], log_file: Path) -> AsyncIterator[str]:
    """URL of a router that is started; its workers may not be up yet."""
    port, metrics = free_port(), free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with log_file.open("wb") as output:
        router = await asyncio.create_subprocess_exec(
            *(python, "-m", "sglang_router.launch_router", "--worker-urls", *workers),
            *(*arguments, "--policy", "round_robin"),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        router.terminate()
        await asyncio.wait_for(router.wait(), 30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[list[FakeServer]]:
    async with serving(FakeServer()) as first, serving(FakeServer()) as second:
        yield sorted([first, second], key=lambda fake: fake.url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routed(
    sglang_python: str, fakes: list[FakeServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Attached]:
    folder: Path = tmp_path_factory.mktemp("router")
    async with routing(sglang_python, [one.url for one in fakes], folder / "router.log") as url:
        spec = ServerSpec(str(CHECKPOINT), url=url, start_deadline_s=120.0)
        engine_spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=spec)
        server = Server(engine_spec, spec, log_file=folder / "server.log")
        await server.start(folder)
        client = server.client
        assert isinstance(client, RoutedClient)
        async with asyncio.timeout(60):  # the router finds its workers one by one
            while len(client.workers) < len(fakes):
                await asyncio.sleep(0.2)
                await server.start(folder)
                client = server.client
                assert isinstance(client, RoutedClient)
        engine = SGLangEngine(engine_spec, server)
        dialect = dialect_of(await client.endpoints())
        served = Served(dialect)
        versions = Versions(engine, spec, folder=folder, served=served, transport=Disk())
        try:
            yield Attached(fakes[0], engine, versions, folder)
        finally:
            await server.stop()


async def test_every_worker_gets_each_version_and_samples_it(
    routed: Attached, fakes: list[FakeServer]
) -> None:
    for stored in (OLD, NEW):
        number = await routed.activate(stored)
        for fake in fakes:
            assert fake.label == str(number)
            fake.calls.clear()
        for _ in range(4):
            assert await routed.sample() == [(number, 4)]
        assert all("/generate" in fake.calls for fake in fakes)
        found = await routed.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(stored, PROBE[0]), atol=1e-5)


@pytest.mark.parametrize("fault", ["ignores_weights", "keeps_stale_copy", "refuses"])
async def test_a_version_that_one_worker_does_not_take_is_served_by_none(
    routed: Attached, fakes: list[FakeServer], fault: str
) -> None:
    old = await routed.activate(OLD)
    fakes[1].faults = [fault]  # type: ignore[list-item]
    with pytest.raises(WeightsCorrupt, match=r"score one version differently|400"):
        await routed.activate(NEW)
    assert {fake.label for fake in fakes} == {str(old)}
    assert await routed.versions.is_served()
    found = await routed.engine.score_now(PROBE)
    np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


async def test_a_worker_that_forgot_its_weights_is_seen_and_loaded_again(
    routed: Attached, fakes: list[FakeServer]
) -> None:
    old = await routed.activate(OLD)
    fakes[1].forget()
    assert not await routed.versions.is_served()
    await routed.versions.recover()
    assert await routed.versions.is_served()
    assert fakes[1].label == str(old)


async def test_a_router_is_refused_with_a_transport_that_reaches_one_server(
    routed: Attached, tmp_path: Path
) -> None:
    spec = ServerSpec(str(CHECKPOINT), url=routed.engine.server.client.url, transport="tensor")
    server = Server(routed.engine.spec, spec, log_file=tmp_path / "server.log")
    with pytest.raises(ServerFailed, match="updated from disk, not by tensor"):
        await server.start(tmp_path)
    await server.stop()
