"""The one way a service process lives: serve HTTP, run its workers, stop cleanly.

    lifespan up ──> workers start ──> SIGTERM/SIGINT ──> workers drain ──> HTTP stops ──> exit 0
                         └── one raises, or returns unasked ──> the others drain ──> exit 1

A worker's end takes the process down, so that the supervisor restarts a whole process instead of
leaving a half-dead one answering /healthz. While workers drain, /readyz says so.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

import structlog
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict

from shared.process import exit_with
from shared.tasks import drain, end

log = structlog.get_logger()
Worker = Callable[[asyncio.Event], Awaitable[None]]

_HTTP_GOODBYE_S = 5


class Health(BaseModel):
    """Example: {"status": "degraded", "reason": "broker unreachable for 7 s"}."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ok", "degraded"]
    """`degraded`: it lives, and cannot do its work now."""
    reason: str | None = None
    """Why it is degraded; left out where it is not."""


class Readiness(BaseModel):
    """Example: {"status": "unready", "reason": "draining"}."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ready", "unready"]
    """Whether it may get work."""
    reason: str | None = None
    """Why it may not; left out where it may."""


def serve(
    app: FastAPI, *, host: str, port: int, workers: Sequence[Worker] = (), drain_s: float = 20.0
) -> None:
    """Run until SIGTERM, SIGINT or a crash, then exit the process with 0 or 1.

    Workers start once the app's lifespan is up; each gets the event that asks it to stop and has
    `drain_s` to return.
    """
    listening = _listen(host, port)
    raise SystemExit(asyncio.run(_Service(app, listening, workers, drain_s).run()))


def health_router(readiness: Callable[[], str | None]) -> APIRouter:
    """/healthz (alive), /readyz (may get traffic; 503 with `readiness`'s reason), /metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", response_model_exclude_none=True)
    async def healthz() -> Health:
        """Whether the process lives; it does, as long as this is answered."""
        reason = readiness()
        return Health(status="degraded" if reason else "ok", reason=reason)

    @router.get(
        "/readyz",
        response_model_exclude_none=True,
        responses={503: {"model": Readiness, "description": "not ready; names the reason"}},
    )
    async def readyz(request: Request, response: Response) -> Readiness:
        """Whether it may get work."""
        draining = getattr(request.app.state, "draining", False)
        reason = "draining" if draining else readiness()
        response.status_code = 503 if reason else 200
        return Readiness(status="unready" if reason else "ready", reason=reason)

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"description": "Prometheus' text format"}},
    )
    async def metrics() -> Response:
        """Counters and gauges of this process for Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


class _Service:
    def __init__(
        self, app: FastAPI, listening: socket.socket, workers: Sequence[Worker], drain_s: float
    ) -> None:
        self._app = app
        self._listening = listening
        self._workers = workers
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_HTTP_GOODBYE_S,
                lifespan="on",
            )
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        http = asyncio.create_task(self._server.serve([self._listening]), name="http")
        try:
            if not await self._came_up(http, stopped):
                return 0 if self._stop.is_set() and not _crashed(http) else 1
            return await self._work_until_stopped(http, stopped)
        finally:
            await end(stopped)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        log.info("stop_requested", signal=number.name)
        self._stop.set()

    async def _came_up(self, http: asyncio.Task[None], stopped: asyncio.Task[Any]) -> bool:
        """Whether HTTP is served. A stop while the lifespan starts ends that, within bounds."""
        up = asyncio.create_task(self._server.up.wait(), name="up")
        await asyncio.wait({up, http, stopped}, return_when=asyncio.FIRST_COMPLETED)
        await end(up)
        if self._server.up.is_set() and not self._stop.is_set():
            host, port = self._listening.getsockname()[:2]
            log.info("serving", host=host, port=port)
            return True
        self._server.should_exit = True
        await drain({http}, self._drain_s)
        return False

    async def _work_until_stopped(
        self, http: asyncio.Task[None], stopped: asyncio.Task[Any]
    ) -> int:
        jobs = {_start(worker, self._stop) for worker in self._workers}
        await asyncio.wait({*jobs, http, stopped}, return_when=asyncio.FIRST_COMPLETED)
        asked = self._stop.is_set()
        self._app.state.draining = True
        self._stop.set()
        in_time = await drain(jobs, self._drain_s)
        self._server.should_exit = True
        in_time &= await drain({http}, self._drain_s)
        crashed = [task for task in (*jobs, http) if _crashed(task)]
        for task in crashed:
            log.error("worker_crashed", worker=task.get_name(), exc_info=task.exception())
        if not asked and not crashed:
            log.error("worker_returned_unasked", workers=sorted(task.get_name() for task in jobs))
        return 0 if asked and in_time and not crashed else 1


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_Service`: uvicorn re-raises SIGTERM before our workers drain."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        except SystemExit as err:  # the lifespan failed; its traceback is already logged
            raise RuntimeError("the application did not start") from err

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else starts: a port in use costs no model load."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as err:
        listening.close()
        exit_with(f"Cannot listen on {host}:{port}: {err.strerror}. Choose another with --port.")
    listening.listen(2048)
    listening.setblocking(False)
    return listening


def _start(worker: Worker, stop: asyncio.Event) -> asyncio.Task[None]:
    async def work() -> None:
        await worker(stop)

    return asyncio.create_task(work(), name=getattr(worker, "__qualname__", repr(worker)))


def _crashed(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
