"""The trainer's process: HTTP, the job queue, and its entry in the registry. No tensor is here."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.trainer import (
    api,
    evaluation_pages,
    inspection,
    launch_routes,
    operator_routes,
    weight_routes,
)
from services.trainer.config import TrainerConfig
from services.trainer.dashboard.routes import router as dashboard
from services.trainer.disk import Unwritable
from services.trainer.jobs.runner import BeginRanks, JobRunner
from services.trainer.jobs.store import JobStore
from services.trainer.jobs.submission import Refused
from services.trainer.launch import LaunchBoard
from services.trainer.profile.routes import router as profiles
from services.trainer.report.overview import Overviews
from services.trainer.weight_routes import find_shard
from shared.answers import answer_malformed
from shared.api_page import serve_api_page
from shared.body_limit import BodyLimit
from shared.http import HttpClient
from shared.parity.trace import MAX_BODY_BYTES
from shared.redis import broker_trouble, create_redis
from shared.registry import Replica, keep_registered
from shared.service import Worker, health_router
from shared.weights.shard_server import ShardServer


def create_app(config: TrainerConfig, *, begin_ranks: BeginRanks | None = None) -> FastAPI:
    """`begin_ranks` takes the place of torchrun in tests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state
        state.config = config
        state.redis = create_redis(config.redis_url, process=f"trainer-{config.name}")
        state.store = JobStore(config.runs_dir.resolve(), queue_dir=config.queue_dir)
        state.shards = ShardServer(
            lambda *asked: find_shard(state.runner, *asked),
            host=config.host,
            port=config.shards_port,
        )
        state.board = LaunchBoard()
        state.overviews = Overviews()
        async with HttpClient() as http:
            state.http = http
            state.runner = JobRunner(
                state.redis,
                store=state.store,
                config=config,
                http=http,
                shards_url=config.url_at(state.shards.port),
                board=state.board,
                begin_ranks=begin_ranks,
            )
            yield
        await asyncio.to_thread(state.shards.close)
        state.store.close()
        await state.redis.aclose()

    app = FastAPI(title="Tandem trainer", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.include_router(api.router)
    app.include_router(inspection.router)
    app.include_router(launch_routes.router)
    app.include_router(operator_routes.router)
    app.include_router(weight_routes.router)
    app.include_router(profiles)
    app.include_router(dashboard)
    app.include_router(evaluation_pages.router)
    app.include_router(health_router(lambda: broker_trouble(app.state.redis)))
    app.add_exception_handler(Refused, api.answer_refused)
    app.add_exception_handler(Unwritable, api.answer_unwritable)
    answer_malformed(app)
    serve_api_page(app)
    return app


def workers(app: FastAPI, config: TrainerConfig) -> list[Worker]:
    """The loops beside HTTP; they begin once the lifespan is up."""

    async def run_jobs(stop: asyncio.Event) -> None:
        await app.state.runner.run(stop)

    async def stay_registered(stop: asyncio.Event) -> None:
        def describe() -> Replica:
            active = app.state.runner.active
            return Replica(
                service="trainer",
                name=config.name,
                url=config.url,
                pid=os.getpid(),
                job_id=active.parts.job_id if active else None,
                state="serving" if active else "idle",
                policy_version=active.parts.publisher.current if active else None,
                shards_url=config.url_at(app.state.shards.port),
            )

        await keep_registered(app.state.redis, describe, stop)

    return [run_jobs, stay_registered]
