"""Evaluations that the job in progress asks for.

evals stream ──> plans ──> run, pinned ──> eval_finished | eval_failed (events) ──> ack
                   └── a stop or a crash: the message comes again, finished problems are kept
"""

import asyncio
from typing import Any

import structlog
from redis.asyncio import Redis

from services.evaluator.plan import EvaluationFailed, Plan, plans_of_job
from services.evaluator.runner import Runner
from services.evaluator.servers import held_server, reward_servers
from shared import topology
from shared.current_job import CurrentJob
from shared.data import DataError
from shared.errors import DeadlineExceeded, Retryable
from shared.messages import EvalRequested, Event
from shared.profiled import Profiled
from shared.spans import span
from shared.streams import Consumer, backlog, publish
from shared.tasks import following, wait_for_event
from shared.telemetry import counter, note_backlog, now_s

log = structlog.get_logger()

BACKLOG_EVERY_S = 5.0
GOODBYE_S = 3.0  # of the drain time, left for handing work back


class EvalWorker:
    """One evaluation at a time, of the active job."""

    def __init__(
        self,
        redis: Redis,
        runner: Runner,
        current: CurrentJob,
        *,
        replica: str,
        drain_s: float = 20.0,
    ) -> None:
        self._redis = redis
        self._runner = runner
        self._current = current
        self.profiled = Profiled(redis, current, service="evaluator", replica=replica)
        self._replica = replica
        self._drain_s = max(drain_s - GOODBYE_S, 0.0)
        self._changed = asyncio.Event()
        told = "Evaluations by how they ended."
        self._ended = counter("evaluations_total", told, ("outcome",), ("finished", "failed"))
        self.busy = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve one job after the other until `stop`."""
        while not stop.is_set():
            self._changed.clear()
            job_id = self._current.active_id
            if job_id is None:
                await wait_for_event(self._changed, 0.5)
                continue
            async with following(stop, self._changed):
                await self._consumer(job_id).run(
                    self._handle, stop=self._changed, drain_s=self._drain_s
                )

    async def follow(self, stop: asyncio.Event) -> None:
        """Keep up with the trainer's announcements."""
        await self._current.follow(stop, self._changed)

    async def watch_backlog(self, stop: asyncio.Event) -> None:
        """Measure how many evaluations wait."""
        while not stop.is_set():
            if job_id := self._current.active_id:
                stream = topology.evals(job_id)
                note_backlog("evals", await backlog(self._redis, stream, topology.EVALUATORS))
            await wait_for_event(stop, BACKLOG_EVERY_S)

    def _consumer(self, job_id: str) -> Consumer:
        stream, group = topology.evals(job_id), topology.EVALUATORS
        return Consumer(self._redis, stream, group, self._replica)

    async def _handle(self, body: bytes) -> None:
        request = EvalRequested.unpack(body)
        self.busy = True
        try:
            with structlog.contextvars.bound_contextvars(eval_id=request.eval_id):
                await self._answer(request, self._changed)
        finally:
            self.busy = False

    async def _answer(self, request: EvalRequested, stop: asyncio.Event) -> None:
        """Publish each suite's result or why there is none; the message is acked after that.

        `eval_finished` and `eval_failed` are of the job's first suite, and come last. What is taken
        up after its deadline has been given up, or asked again, by the trainer.
        """
        if (late_s := now_s() - request.deadline_s) > 0:
            log.warning("evaluation_too_late", eval_id=request.eval_id, late_s=round(late_s))
            return
        try:
            *others, first = await self._plans(request)
        except (EvaluationFailed, DataError, OSError) as err:
            await self._fail(request, "eval_failed", str(err))
            return
        for plan in others:
            await self._evaluate(request, plan, stop, as_="suite")
        await self._evaluate(request, first, stop, as_="eval")

    async def _evaluate(
        self, request: EvalRequested, plan: Plan, stop: asyncio.Event, *, as_: str
    ) -> None:
        try:
            with span(plan.suite, "evaluations", policy_version=plan.policy_version):
                fields = await self._runner.run(
                    plan,
                    sampler=held_server(self._redis, plan),
                    graders=reward_servers(self._redis),
                    stop=stop,
                )
        except (EvaluationFailed, DeadlineExceeded, OSError) as err:
            await self._fail(request, f"{as_}_failed", str(err), suite=plan.suite)
            return
        await self._publish(request, f"{as_}_finished", fields)
        self._ended.labels("finished").inc()

    async def _fail(self, request: EvalRequested, name: str, error: str, **more: str) -> None:
        log.warning("evaluation_failed", eval_id=request.eval_id, error=error, **more)
        await self._publish(request, name, _failure(request, error) | more)
        self._ended.labels("failed").inc()

    async def _plans(self, request: EvalRequested) -> list[Plan]:
        announced, job = self._current.announced, self._current.job
        if announced is None or job is None or announced.job_id != request.job_id:
            raise Retryable(f"{request.eval_id}: job {request.job_id} is not the current one")
        return await asyncio.to_thread(plans_of_job, request, job)

    async def _publish(self, request: EvalRequested, name: str, fields: dict[str, Any]) -> None:
        event = Event(
            name=name,
            job_id=request.job_id,
            service="evaluator",
            replica=self._replica,
            at_s=now_s(),
            fields=fields,
        )
        await publish(self._redis, topology.events(request.job_id), event.pack())


def _failure(request: EvalRequested, error: str) -> dict[str, Any]:
    return {
        "eval_id": request.eval_id,
        "policy_version": request.policy_version,
        "step": request.step,
        "error": error,
    }
