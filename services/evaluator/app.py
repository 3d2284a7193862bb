"""The evaluator's process: the job's evaluations, those on request, and parity runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.evaluator import api, browsing
from services.evaluator.archive import Archive
from services.evaluator.asked import RequestStore
from services.evaluator.config import EvaluatorConfig
from services.evaluator.parity import api as parity_api
from services.evaluator.parity.requests import ParityRuns
from services.evaluator.requests import Refused, RequestedEvals
from services.evaluator.runner import Runner
from services.evaluator.worker import GOODBYE_S, EvalWorker
from shared.answers import answer_malformed
from shared.api_page import serve_api_page
from shared.body_limit import BodyLimit
from shared.current_job import CurrentJob
from shared.environment import Environment
from shared.http import HttpClient
from shared.redis import broker_trouble, create_redis
from shared.registry import Replica, keep_registered
from shared.service import Worker, health_router

MAX_BODY_BYTES = 64 * 2**20


def create_app(config: EvaluatorConfig) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state
        state.redis = create_redis(config.redis_url, process=f"evaluator-{config.name}")
        state.archive = Archive(config.runs_dir.resolve())
        state.current = CurrentJob(state.redis)
        state.environment = Environment(
            state.redis, state.current, config, service="evaluator", replica=config.name
        )
        # Whoever asks repeats, up to a deadline. Two evaluations at a time, room for grading each.
        connections = 4 * config.runner.samples_in_flight
        async with HttpClient(attempts=1, max_connections=connections) as http:
            runner = Runner(http, config.runner, runs_dir=config.runs_dir.resolve())
            state.worker = EvalWorker(
                state.redis, runner, state.current, replica=config.name, drain_s=config.drain_s
            )
            state.requested = RequestedEvals(
                state.redis,
                runner,
                state.current,
                http,
                store=RequestStore(config.runs_dir.resolve(), config.name),
                data_roots=(*config.data_roots, config.runs_dir),
                drain_s=max(config.drain_s - GOODBYE_S, 0.0),
            )
            state.parity = ParityRuns(state.redis, http, state.current)
            yield
        await state.redis.aclose()

    app = FastAPI(title="Tandem evaluator", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.include_router(browsing.router)
    app.include_router(api.router)
    app.include_router(parity_api.router)
    app.include_router(health_router(lambda: broker_trouble(app.state.redis)))
    app.add_exception_handler(Refused, api.answer_refused)
    answer_malformed(app)
    serve_api_page(app)
    return app


def workers(app: FastAPI, config: EvaluatorConfig) -> list[Worker]:
    """The loops beside HTTP; they begin once the lifespan is up."""

    async def follow_jobs(stop: asyncio.Event) -> None:
        await app.state.worker.follow(stop)

    async def evaluate_jobs(stop: asyncio.Event) -> None:
        await app.state.worker.run(stop)

    async def evaluate_requests(stop: asyncio.Event) -> None:
        await app.state.requested.run(stop)

    async def compare_on_request(stop: asyncio.Event) -> None:
        await app.state.parity.run(stop)

    async def watch_backlog(stop: asyncio.Event) -> None:
        await app.state.worker.watch_backlog(stop)

    async def stay_registered(stop: asyncio.Event) -> None:
        def describe() -> Replica:
            return Replica(
                service="evaluator",
                name=config.name,
                url=config.url,
                pid=os.getpid(),
                job_id=app.state.current.active_id,
                state="serving" if app.state.worker.busy else "idle",
            )

        await keep_registered(app.state.redis, describe, stop)

    async def take_part_in_profiles(stop: asyncio.Event) -> None:
        await app.state.worker.profiled.run(stop)

    async def tell_environment(stop: asyncio.Event) -> None:
        await app.state.environment.run(stop)

    return [
        follow_jobs,
        evaluate_jobs,
        evaluate_requests,
        compare_on_request,
        watch_backlog,
        stay_registered,
        take_part_in_profiles,
        tell_environment,
    ]
