"""A sampler of one checkpoint: `python -m services.rollout.standalone --checkpoint DIR`.

No broker and no trainer: the weights are read from disk, once. For evaluations of a checkpoint that
nobody serves. `--weights` takes a version that a run has published instead of the
checkpoint's own weights.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, FastAPI
from pydantic import Field

from services.rollout import api
from services.rollout.config import RolloutConfig
from services.rollout.info import ServerInfo
from services.rollout.serving import Serving, serving_job
from shared.answers import answer_malformed
from shared.api_page import serve_api_page
from shared.config import ServiceConfig, load_config, settings_of
from shared.errors import ChannelClosed, DeadlineExceeded, Fatal, RemoteError
from shared.messages import JobAnnounced
from shared.process import die_with_parent
from shared.service import health_router, serve
from shared.tasks import wait_for_event
from shared.telemetry import configure_logging

JOB_ID = "standalone"
CANNOT = "cannot be served"
LOAD_S = 1800.0


class StandaloneConfig(ServiceConfig):
    """A sampler of one checkpoint."""

    model_config = settings_of("standalone")

    checkpoint: Path
    """Release directory: architecture, tokenizer and, unless `weights` is given, weights."""
    weights: Path | None = None
    """A published version of a run: `runs/<job>/weights/v<version>`."""
    policy_version: int = Field(0, ge=0)
    """What the weights are called."""
    context_length: int = Field(4096, gt=1)
    """Prompt and response together."""
    max_running_requests: int = Field(128, gt=0)
    """Completions decoded at the same time."""
    quantise_activations: bool = True
    """Round activations as a server of the release does."""
    serve_as: Literal["quantised", "float32"] = "quantised"
    """How the run that published `weights` serves them (`rollout.weights`)."""
    num_threads: int = Field(1, gt=0)
    """Threads of the engine."""
    parent_pid: int = 0
    """End with this process; 0: with nobody."""


@dataclass(slots=True)
class StandaloneServer:
    """What the HTTP handlers of a rollout server ask, without a broker behind it."""

    config: RolloutConfig
    serving: Serving | None = None

    def unready(self) -> str | None:
        if self.serving is None:
            return "loading the checkpoint"
        return "the engine died" if self.serving.engine.died.is_set() else None

    def info(self) -> ServerInfo:
        engine = self.serving.engine if self.serving else None
        return ServerInfo(
            service="rollout",
            name=JOB_ID,
            url=self.config.url,
            pid=os.getpid(),
            job_id=JOB_ID,
            state="serving" if engine else "starting",
            policy_version=engine.policy_version if engine else None,
            unready=self.unready(),
            effective_checksum=engine.checksum if engine else None,
            engine_pid=engine.pid if engine else None,
        )


def main() -> None:
    config = load_config(StandaloneConfig)
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    configure_logging(JOB_ID, level=config.log.level, json=config.log.as_json)
    server = StandaloneServer(RolloutConfig(port=config.port))

    async def serve_checkpoint(stop: asyncio.Event) -> None:
        await _serve_checkpoint(config, server, stop)

    app = create_app(server)
    workers = [serve_checkpoint]
    serve(app, host=config.host, port=config.port, workers=workers, drain_s=config.drain_s)


def create_app(server: StandaloneServer) -> FastAPI:
    app = FastAPI(title="Tandem standalone sampler", docs_url=None, redoc_url=None)
    app.state.server = server
    router = APIRouter(prefix="/v1", tags=["sampling"])
    router.post("/generate", responses=api.PROBLEMS)(api.generate)
    router.post("/score", responses=api.PROBLEMS)(api.score)
    router.get("/info")(api.info)
    app.include_router(router)
    app.include_router(health_router(server.unready))
    for kind in api.STATUS:
        app.add_exception_handler(kind, api.answer_error)
    answer_malformed(app)
    serve_api_page(app)
    return app


async def _serve_checkpoint(
    config: StandaloneConfig, server: StandaloneServer, stop: asyncio.Event
) -> None:
    """Load, then serve until `stop`; what cannot be served is told in one sentence on stderr."""
    source = (config.weights or config.checkpoint).absolute()
    died: asyncio.Event | None = None
    try:
        async with serving_job(_job(config), server.config, on_change=lambda: None) as serving:
            await serving.engine.load_from(source, config.policy_version, timeout_s=LOAD_S)
            server.serving, died = serving, serving.engine.died
            while not (stop.is_set() or died.is_set()):
                await wait_for_event(stop, 0.2)
            server.serving = None
    except (ValueError, OSError, RemoteError, ChannelClosed, DeadlineExceeded) as err:
        sys.stderr.write(f"{source} {CANNOT}: {err}\n")
        raise Fatal(f"{source} {CANNOT}") from err
    if died.is_set():
        raise Fatal("the engine died")


def _job(config: StandaloneConfig) -> JobAnnounced:
    """The part of a job that an engine is started with; nothing else of it is ever used."""
    job = {
        "name": JOB_ID,
        "steps": 1,
        "model": {"rollout_checkpoint": str(config.checkpoint)},
        "data": {"path": "none"},
        "sampling": {"context_length": config.context_length, "max_response_tokens": 1},
        "actor": {"max_tokens_per_gpu": config.context_length},
        "rollout": {
            "max_running_requests": config.max_running_requests,
            "quantise_activations": config.quantise_activations,
            "weights": config.serve_as,
            "num_threads": config.num_threads,
        },
    }
    return JobAnnounced(job_id=JOB_ID, state="active", trainer_url="", job=job)


if __name__ == "__main__":
    main()
