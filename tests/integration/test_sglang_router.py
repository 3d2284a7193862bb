"""Workers that come and go behind a router: none of them samples with weights nobody proved.

The router is a small one that spreads calls in turn, as SGLang's does, over whom it calls healthy.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import Served
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import Disk
from services.rollout.engine.sglang.versions import Versions
from shared.http import HttpClient
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer, serving
from tests.integration.sglang_world import NEW, OLD, Attached
from tests.served import served


@dataclass
class FakeRouter:
    healthy: list[str] = field(default_factory=list)
    _http: HttpClient = field(default_factory=lambda: HttpClient(attempts=1))
    _turn: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/workers")(self._workers)
        app.post("/generate")(self._generate)
        return app

    async def close(self) -> None:
        await self._http.close()

    async def _workers(self) -> dict[str, Any]:
        return {"workers": [{"url": url, "is_healthy": True} for url in self.healthy]}

    async def _generate(self, body: dict[str, Any]) -> Any:
        self._turn += 1
        worker = self.healthy[self._turn % len(self.healthy)]
        return await self._http.post(f"{worker}/generate", body, timeout_s=20)


@dataclass
class Routed(Attached):
    router: FakeRouter = field(default_factory=FakeRouter)

    async def guard(self) -> None:
        """What the engine child asks every few seconds, and does."""
        if await self.engine.server.is_well() and await self.versions.is_served():
            self.engine.open_gate()
        else:
            await self.versions.recover()


@contextlib.asynccontextmanager
async def routed(folder: Path, *fakes: FakeServer) -> AsyncIterator[Routed]:
    """Our side of a router that knows the first of `fakes`."""
    router = FakeRouter()
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving(fake))
        stack.push_async_callback(router.close)
        url = await stack.enter_async_context(served(router.app(), lifespan=False, force=True))
        router.healthy = [fakes[0].url]
        spec = ServerSpec(str(CHECKPOINT), url=url, start_deadline_s=20.0)
        engine_spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=spec)
        server = Server(engine_spec, spec, log_file=folder / "server.log")
        stack.push_async_callback(server.stop)
        await server.start(folder)
        engine = SGLangEngine(engine_spec, server)
        versions = Versions(engine, spec, folder=folder, served=Served("session"), transport=Disk())
        yield Routed(fakes[0], engine, versions, folder, router=router)


async def test_a_worker_that_becomes_healthy_is_loaded_before_its_samples_count(
    tmp_path: Path,
) -> None:
    first, late = FakeServer(), FakeServer()
    async with routed(tmp_path, first, late) as world:
        old = await world.activate(OLD)
        assert await world.engine.server.is_well()
        world.router.healthy.append(late.url)
        assert not await world.engine.server.is_well()
        sampling = asyncio.create_task(world.sample(num_samples=4))
        async with asyncio.timeout(20):  # half of the calls met the worker that knows no version
            while not world.engine.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not sampling.done()
        await world.guard()
        assert await asyncio.wait_for(sampling, 20) == [(old, 4)]
        assert late.label == first.label == str(old)
        new = await world.activate(NEW)
        assert late.label == first.label == str(new)
        late.calls.clear()
        assert await world.sample(num_samples=4) == [(new, 4)]
        assert "/generate" in late.calls
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(NEW, PROBE[0]), atol=1e-5)


async def test_a_worker_that_went_is_left_out_and_loaded_when_it_is_back(tmp_path: Path) -> None:
    first, other = FakeServer(), FakeServer()
    async with routed(tmp_path, first, other) as world:
        world.router.healthy.append(other.url)
        await world.guard()
        await world.activate(OLD)
        world.router.healthy.remove(other.url)
        other.is_sick = True
        await world.guard()
        new = await world.activate(NEW)
        assert (first.label, other.label) == (str(new), "0")
        other.is_sick = False
        world.router.healthy.append(other.url)
        await world.guard()
        assert (first.label, other.label) == (str(new), str(new))
        assert await world.sample(num_samples=4) == [(new, 4)]


async def test_a_router_that_does_not_answer_is_unwell(tmp_path: Path) -> None:
    async with routed(tmp_path, FakeServer()) as world:
        await world.activate(OLD)
        world.engine.server.client.url = "http://127.0.0.1:9"
        assert not await world.engine.server.is_well()
