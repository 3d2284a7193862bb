"""Evaluations that people ask for: of the version that a server serves, or of a bare checkpoint.

They run one after the other. Nobody holds a server for them: if the trainer gives it another
version meanwhile, the evaluation fails and says so, instead of mixing two policies. A checkpoint
gets a sampler of its own; the same request for the same checkpoint goes on where it was left.
"""

import asyncio
import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

import structlog
from pydantic import BaseModel, Field, model_validator
from redis.asyncio import Redis

from services.evaluator.checkpoint import Checkpoint, serving
from services.evaluator.plan import EvaluationFailed, Plan, Policy, make_plan, suite_slug
from services.evaluator.runner import Runner
from services.evaluator.servers import Address, fixed_server, named_server, reward_servers
from shared.current_job import CurrentJob
from shared.data import DataError
from shared.errors import DeadlineExceeded, HttpFailed, Retryable, TandemError
from shared.http import HttpClient
from shared.job import expand_path
from shared.job_eval import SuiteSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.registry import Replica, live_replicas
from shared.telemetry import now_s

log = structlog.get_logger()

KEPT = 100
GRADING_TIMEOUT_S = 5.0
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
    checkpoint: str | None = None
    """A release directory, or a published version (`runs/<job>/weights/v<version>`), instead."""
    context_length: int | None = Field(None, gt=1)
    """Of the checkpoint's sampler; default: what the longest prompt and its response need."""
    max_running_requests: int = Field(128, gt=0)
    """Completions that the checkpoint's sampler decodes at the same time."""
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.replica is not None and self.checkpoint is not None:
            raise ValueError("give a replica or a checkpoint, not both")
        return self


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
    within_s: float
    replica: str = ""
    checkpoint: Checkpoint | None = None


class RequestedEvals:
    """Accepts requests, runs them in turn, remembers the last hundred."""

    def __init__(
        self,
        redis: Redis,
        runner: Runner,
        current: CurrentJob,
        http: HttpClient,
        *,
        data_roots: Iterable[Path],
    ) -> None:
        self._redis = redis
        self._runner = runner
        self._current = current
        self._http = http
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
        self._check_path("data.path", request.data.path)
        if request.checkpoint is not None:
            accepted = await self._of_checkpoint(request, request.checkpoint)
        else:
            accepted = await self._of_server(request)
        plan = accepted.plan
        known = self._statuses.get(plan.eval_id)
        if known is not None and known.state in ("queued", "running"):
            return known
        self._set(
            EvalStatus(
                eval_id=plan.eval_id,
                state="queued",
                suite=plan.suite,
                replica=accepted.replica,
                policy_version=plan.policy_version,
                problems=len(plan.problems),
            )
        )
        self._waiting.put_nowait(accepted)
        return self._statuses[plan.eval_id]

    async def _of_server(self, request: EvalRequest) -> _Accepted:
        await self._current.refresh()
        job, announced = self._current.job, self._current.announced
        if job is None or announced is None:
            raise Refused("replica", "no job has given a server a policy yet", status=409)
        replica = await self._server(request.replica, announced.job_id)
        assert replica.policy_version is not None  # `_server` chose it for that
        stem = f"x{secrets.token_hex(4)}"
        named = (announced.job_id, replica.policy_version, stem)
        plan = await self._plan(request, Policy.of_job(job), *named)
        return _Accepted(plan, request.deadline_s, replica=replica.name)

    async def _of_checkpoint(self, request: EvalRequest, given: str) -> _Accepted:
        path = self._check_path("checkpoint", given)
        assert path is not None
        try:
            checkpoint = await asyncio.to_thread(Checkpoint.find, path)
            arch = await asyncio.to_thread(Architecture.load, checkpoint.release)
        except (ValueError, OSError) as err:
            raise Refused("checkpoint", str(err)) from err
        policy = Policy(
            checkpoint=checkpoint.release,
            context_length=request.context_length or arch.max_position_embeddings,
            max_running_requests=request.max_running_requests,
            grading_timeout_s=GRADING_TIMEOUT_S,
        )
        stem = _stem_of(request, checkpoint)
        plan = await self._plan(request, policy, checkpoint.job_id, checkpoint.policy_version, stem)
        return _Accepted(plan, request.deadline_s, checkpoint=checkpoint)

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
            async with self._sampler(plan, accepted) as sampler:
                result = await self._runner.run(
                    plan,
                    sampler=sampler,
                    graders=reward_servers(self._redis),
                    stop=stop,
                    progress=lambda done, _: self._change(plan.eval_id, problems_done=done),
                )
        except (EvaluationFailed, DeadlineExceeded, HttpFailed, Retryable, OSError) as err:
            log.warning("requested_evaluation_failed", eval_id=plan.eval_id, error=str(err))
            self._change(plan.eval_id, state="failed", error=str(err))
        else:
            self._change(plan.eval_id, state="finished", result=result)

    @contextlib.asynccontextmanager
    async def _sampler(self, plan: Plan, accepted: _Accepted) -> AsyncIterator[Address]:
        if accepted.checkpoint is None:
            yield named_server(self._redis, plan, accepted.replica)
            return
        async with serving(
            accepted.checkpoint,
            self._http,
            context_length=plan.longest,
            max_running_requests=plan.max_running_requests,
            deadline_s=plan.deadline_s,
        ) as url:
            yield fixed_server(url)

    async def _server(self, name: str | None, job_id: str) -> Replica:
        found = await live_replicas(self._redis, "rollout")
        serving = [one for one in found if one.job_id == job_id and one.policy_version is not None]
        for one in serving:
            if name is None or one.name == name:
                return one
        names = ", ".join(one.name for one in serving) or "none"
        raise Refused("replica", f"{name or 'no server'} serves no version; serving: {names}")

    async def _plan(
        self, request: EvalRequest, policy: Policy, job_id: str, version: int, stem: str
    ) -> Plan:
        try:
            return await asyncio.to_thread(
                make_plan,
                request,
                policy,
                eval_id=f"{job_id}.{stem}",
                job_id=job_id,
                stem=stem,
                policy_version=version,
                step=version,
                seed=request.seed,
                deadline_s=0.0,
            )
        except DataError as err:
            raise Refused("data", str(err)) from err
        except EvaluationFailed as err:
            raise Refused("data.prompt_format", str(err)) from err
        except OSError as err:
            raise Refused("checkpoint", str(err)) from err

    def _check_path(self, key: str, given: str | None) -> Path | None:
        if given is None:
            return None
        try:
            path = expand_path(given).resolve()
        except ValueError as err:
            raise Refused(key, str(err)) from err
        if not any(path.is_relative_to(root) for root in self._roots):
            raise Refused(key, f"{path} is outside the data roots")
        return path

    def _set(self, status: EvalStatus) -> None:
        self._statuses[status.eval_id] = status
        while len(self._statuses) > KEPT:
            self._statuses.popitem(last=False)

    def _change(self, eval_id: str, **fields: Any) -> None:
        if status := self._statuses.get(eval_id):
            self._statuses[eval_id] = status.model_copy(update=fields)


def _stem_of(request: EvalRequest, checkpoint: Checkpoint) -> str:
    """The same for the same question to the same checkpoint, so that it is taken up again."""
    asked = request.model_dump_json(exclude={"deadline_s", "max_running_requests"})
    digest = blake2b(f"{checkpoint.fingerprint}{asked}".encode(), digest_size=4).hexdigest()
    return f"c{digest}.{suite_slug(request.suite)}"


def _due(plan: Plan, within_s: float) -> Plan:
    """The plan with its deadline counted from now."""
    return replace(plan, deadline_s=now_s() + within_s)


def _allowed_roots(configured: Iterable[Path]) -> list[Path]:
    named = os.environ.get(DATA_ROOT_VARIABLE)
    roots = [Path.cwd(), *configured, *([Path(named)] if named else [])]
    return [root.expanduser().resolve() for root in roots]
