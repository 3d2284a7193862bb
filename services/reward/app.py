"""The reward service's process: the grading pool, HTTP, and the groups of the job in progress."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.reward import api
from services.reward.config import RewardConfig
from services.reward.grading import Grading
from services.reward.pool.pool import GradingPool
from services.reward.worker import GradeWorker
from shared.answers import answer_malformed
from shared.api_page import serve_api_page
from shared.body_limit import BodyLimit
from shared.current_job import CurrentJob
from shared.environment import Environment
from shared.redis import broker_trouble, create_redis
from shared.registry import Replica, keep_registered
from shared.service import Worker, health_router


def create_app(config: RewardConfig) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state
        state.limits = config.limits
        state.pool = await GradingPool.start(config.pool)
        state.grading = Grading(state.pool, config.remotes)
        state.redis = create_redis(config.redis_url, process=f"reward-{config.name}")
        current = CurrentJob(state.redis)
        state.environment = Environment(
            state.redis, current, config, service="reward", replica=config.name
        )
        state.worker = GradeWorker(
            state.redis,
            state.grading,
            current,
            replica=config.name,
            concurrency=config.groups_in_flight,
            drain_s=config.drain_s,
        )
        yield
        await state.grading.close()
        await state.pool.close()
        await state.redis.aclose()

    app = FastAPI(title="Tandem reward", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=config.limits.max_body_bytes)
    app.include_router(api.router)
    app.include_router(
        health_router(lambda: app.state.pool.failure or broker_trouble(app.state.redis))
    )
    answer_malformed(app)
    serve_api_page(app)
    return app


def workers(app: FastAPI, config: RewardConfig) -> list[Worker]:
    """The loops beside HTTP; they begin once the lifespan is up."""

    async def follow_jobs(stop: asyncio.Event) -> None:
        await app.state.worker.follow(stop)

    async def grade_groups(stop: asyncio.Event) -> None:
        await app.state.worker.run(stop)

    async def guard_pool(stop: asyncio.Event) -> None:
        await app.state.pool.guard(stop)

    async def watch_backlog(stop: asyncio.Event) -> None:
        await app.state.worker.watch_backlog(stop)

    async def stay_registered(stop: asyncio.Event) -> None:
        def describe() -> Replica:
            job_id = app.state.worker.job_id
            return Replica(
                service="reward",
                name=config.name,
                url=config.url,
                pid=os.getpid(),
                job_id=job_id,
                state="serving" if job_id else "idle",
            )

        await keep_registered(app.state.redis, describe, stop)

    async def take_part_in_profiles(stop: asyncio.Event) -> None:
        await app.state.worker.profiled.run(stop)

    async def tell_environment(stop: asyncio.Event) -> None:
        await app.state.environment.run(stop)

    return [
        follow_jobs,
        grade_groups,
        guard_pool,
        watch_backlog,
        stay_registered,
        take_part_in_profiles,
        tell_environment,
    ]
