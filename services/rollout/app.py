"""The rollout service's process: HTTP, the worker, and the engine child. No tensor is here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.rollout import api
from services.rollout.config import RolloutConfig
from services.rollout.server import RolloutServer
from services.rollout.worker import SampleWorker
from shared.answers import answer_malformed
from shared.api_page import serve_api_page
from shared.body_limit import BodyLimit
from shared.redis import create_redis
from shared.service import Worker, health_router


def create_app(config: RolloutConfig) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state
        redis = create_redis(config.redis_url, process=f"rollout-{config.name}")
        state.server = RolloutServer(redis, config)
        state.worker = SampleWorker(state.server)
        yield
        await state.server.close()
        await redis.aclose()

    app = FastAPI(title="Tandem rollout", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=config.limits.max_body_bytes)
    app.include_router(api.router)
    app.include_router(health_router(lambda: app.state.server.unready()))
    for kind in api.STATUS:
        app.add_exception_handler(kind, api.answer_error)
    answer_malformed(app)
    serve_api_page(app)
    return app


def workers(app: FastAPI) -> list[Worker]:
    """The loops beside HTTP; they begin once the lifespan is up."""

    async def run_engines(stop: asyncio.Event) -> None:
        await app.state.server.run(stop)

    async def watch(stop: asyncio.Event) -> None:
        await app.state.server.watch(stop)

    async def guard_engine(stop: asyncio.Event) -> None:
        await app.state.server.guard_engine(stop)

    async def stay_registered(stop: asyncio.Event) -> None:
        await app.state.server.stay_registered(stop)

    async def sample(stop: asyncio.Event) -> None:
        await app.state.worker.run(stop)

    async def watch_backlog(stop: asyncio.Event) -> None:
        await app.state.worker.watch_backlog(stop)

    async def take_part_in_profiles(stop: asyncio.Event) -> None:
        await app.state.server.profiled.run(stop)

    async def tell_environment(stop: asyncio.Event) -> None:
        await app.state.server.environment.run(stop)

    return [
        run_engines,
        watch,
        guard_engine,
        stay_registered,
        sample,
        watch_backlog,
        take_part_in_profiles,
        tell_environment,
    ]
