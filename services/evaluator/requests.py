"""Evaluations that people ask for: of the version that a server serves right now.

They run one after the other. Nobody holds the server for them: if the trainer gives it another
version meanwhile, the evaluation fails and says so, instead of mixing two policies.
"""

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import BaseModel, Field
from redis.asyncio import Redis

from services.evaluator.plan import EvaluationFailed, Plan, Policy, make_plan
from services.evaluator.runner import Runner
from services.evaluator.servers import named_server, reward_servers
from shared.current_job import CurrentJob
from shared.data import DataError
from shared.errors import DeadlineExceeded, HttpFailed, Retryable, TandemError
from shared.job import DataSection, Job, SuiteSection, expand_path
from shared.registry import Replica, live_replicas
from shared.telemetry import now_s

log = structlog.get_logger()

KEPT = 100
DATA_ROOT_VARIABLE = "DATA_ROOT"
State = Literal["queued", "running", "finished", "failed"]


class Refused(TandemError):
    """The request cannot be carried out as it is; names the key."""

    def __init__(self, key: str, message: str, *, status: int = 422) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message
        self.status = status


class EvalRequest(SuiteSection):
    """POST /v1/evals."""

    samples_per_problem: int = Field(8, gt=0, le=1024)
    deadline_s: float = Field(600.0, gt=0)
    """Seconds from the start of the evaluation."""
    replica: str | None = None
    """The rollout server to use; default: the first one that serves a version."""
    seed: int = Field(0, ge=0)


class EvalStatus(BaseModel):
    """GET /v1/evals/{id}."""

    eval_id: str
    state: State
    suite: str
    replica: str
    policy_version: int
    problems_done: int = 0
    problems: int
    error: str = ""
    result: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Accepted:
    plan: Plan
    replica: str
    within_s: float


class RequestedEvals:
    """Accepts requests, runs them in turn, remembers the last hundred."""

    def __init__(
        self, redis: Redis, runner: Runner, current: CurrentJob, *, data_roots: Iterable[Path]
    ) -> None:
        self._redis = redis
        self._runner = runner
        self._current = current
        self._roots = _allowed_roots(data_roots)
        self._waiting: asyncio.Queue[_Accepted] = asyncio.Queue()
        self._statuses: OrderedDict[str, EvalStatus] = OrderedDict()

    def all(self) -> list[EvalStatus]:
        """Oldest first."""
        return list(self._statuses.values())

    def get(self, eval_id: str) -> EvalStatus | None:
        return self._statuses.get(eval_id)

    async def submit(self, request: EvalRequest) -> EvalStatus:
        """Check the request and queue it; raises `Refused`."""
        await self._current.refresh()
        job, announced = self._current.job, self._current.announced
        if job is None or announced is None:
            raise Refused("replica", "no job has given a server a policy yet", status=409)
        replica = await self._server(request.replica, announced.job_id)
        assert replica.policy_version is not None  # `_server` chose it for that
        self._check_path(request.data)
        plan = await self._plan(request, job, announced.job_id, replica.policy_version)
        self._set(
            EvalStatus(
                eval_id=plan.eval_id,
                state="queued",
                suite=plan.suite,
                replica=replica.name,
                policy_version=plan.policy_version,
                problems=len(plan.problems),
            )
        )
        self._waiting.put_nowait(_Accepted(plan, replica.name, request.deadline_s))
        return self._statuses[plan.eval_id]

    async def run(self, stop: asyncio.Event) -> None:
        """Carry out what is queued, one at a time, until `stop`."""
        while not stop.is_set():
            try:
                accepted = await asyncio.wait_for(self._waiting.get(), 0.5)
            except TimeoutError:
                continue
            await self._carry_out(accepted, stop)

    async def _carry_out(self, accepted: _Accepted, stop: asyncio.Event) -> None:
        plan = _due(accepted.plan, accepted.within_s)
        self._change(plan.eval_id, state="running")
        try:
            result = await self._runner.run(
                plan,
                sampler=named_server(self._redis, plan, accepted.replica),
                graders=reward_servers(self._redis),
                stop=stop,
                progress=lambda done, _: self._change(plan.eval_id, problems_done=done),
            )
        except (EvaluationFailed, DeadlineExceeded, HttpFailed, Retryable, OSError) as err:
            log.warning("requested_evaluation_failed", eval_id=plan.eval_id, error=str(err))
            self._change(plan.eval_id, state="failed", error=str(err))
        else:
            self._change(plan.eval_id, state="finished", result=result)

    async def _server(self, name: str | None, job_id: str) -> Replica:
        found = await live_replicas(self._redis, "rollout")
        serving = [one for one in found if one.job_id == job_id and one.policy_version is not None]
        for one in serving:
            if name is None or one.name == name:
                return one
        names = ", ".join(one.name for one in serving) or "none"
        raise Refused("replica", f"{name or 'no server'} serves no version; serving: {names}")

    async def _plan(self, request: EvalRequest, job: Job, job_id: str, version: int) -> Plan:
        eval_id = f"{job_id}.x{secrets.token_hex(4)}"
        try:
            return await asyncio.to_thread(
                make_plan,
                request,
                Policy.of_job(job),
                eval_id=eval_id,
                job_id=job_id,
                stem=eval_id.removeprefix(f"{job_id}."),
                policy_version=version,
                step=version,
                seed=request.seed,
                deadline_s=0.0,
            )
        except DataError as err:
            raise Refused("data", str(err)) from err
        except EvaluationFailed as err:
            raise Refused("data.prompt_format", str(err)) from err

    def _check_path(self, data: DataSection) -> None:
        if data.path is None:
            return
        try:
            path = expand_path(data.path).resolve()
        except ValueError as err:
            raise Refused("data.path", str(err)) from err
        if not any(path.is_relative_to(root) for root in self._roots):
            raise Refused("data.path", f"{path} is outside the data roots")

    def _set(self, status: EvalStatus) -> None:
        self._statuses[status.eval_id] = status
        while len(self._statuses) > KEPT:
            self._statuses.popitem(last=False)

    def _change(self, eval_id: str, **fields: Any) -> None:
        if status := self._statuses.get(eval_id):
            self._statuses[eval_id] = status.model_copy(update=fields)


def _due(plan: Plan, within_s: float) -> Plan:
    """The plan with its deadline counted from now."""
    return replace(plan, deadline_s=now_s() + within_s)


def _allowed_roots(configured: Iterable[Path]) -> list[Path]:
    named = os.environ.get(DATA_ROOT_VARIABLE)
    roots = [Path.cwd(), *configured, *([Path(named)] if named else [])]
    return [root.expanduser().resolve() for root in roots]
