"""Evaluations that people ask for: of the version that a server serves, or of a bare checkpoint.

They run one after the other. Nobody holds a server for them: if the trainer gives it another
version meanwhile, the evaluation fails and says so, instead of mixing two policies. A checkpoint
gets a sampler of its own; the same request for the same checkpoint goes on where it was left.
What was accepted is on disk: a restarted process takes it up, oldest first.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from services.evaluator.asked import Asked, EvalRequest, EvalStatus, RequestStore
from services.evaluator.checkpoint import Checkpoint, serving, whole
from services.evaluator.plan import EvaluationFailed, Plan, Policy, make_plan, suite_slug
from services.evaluator.runner import Runner
from services.evaluator.servers import Address, fixed_server, named_server, reward_servers
from services.evaluator.turns import Turns
from shared.current_job import CurrentJob
from shared.data import DataError
from shared.errors import DeadlineExceeded, HttpFailed, Retryable, TandemError
from shared.http import HttpClient
from shared.job import expand_path
from shared.models.deepseek_v4.architecture import Architecture
from shared.registry import Replica, live_replicas
from shared.telemetry import now_s

log = structlog.get_logger()

MAX_ATTEMPTS = 3
GRADING_TIMEOUT_S = 5.0
DATA_ROOT_VARIABLE = "DATA_ROOT"


class Refused(TandemError):
    """The request cannot be carried out as it is; names the key."""

    def __init__(self, key: str, message: str, *, status: int = 422) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class _Accepted:
    plan: Plan
    within_s: float
    replica: str = ""
    policy: Policy | None = None
    checkpoint: Checkpoint | None = None


class RequestedEvals:
    """Accepts requests, runs them in turn, remembers the last hundred, over restarts as well."""

    def __init__(
        self,
        redis: Redis,
        runner: Runner,
        current: CurrentJob,
        http: HttpClient,
        *,
        store: RequestStore,
        data_roots: Iterable[Path],
        drain_s: float = 20.0,
    ) -> None:
        self._redis = redis
        self._runner = runner
        self._current = current
        self._http = http
        self._roots = _allowed_roots(data_roots)
        self._stop = asyncio.Event()
        self._turns = Turns(
            self._carry_out, lambda one: self._hand_back(one.plan.eval_id), drain_s=drain_s
        )
        self._store = store

    def all(self) -> list[EvalStatus]:
        """Oldest first."""
        return [one.status for one in self._store.all()]

    def get(self, eval_id: str) -> EvalStatus | None:
        asked = self._store.get(eval_id)
        return asked.status if asked else None

    async def submit(self, request: EvalRequest) -> EvalStatus:
        """Check the request, keep it and queue it; raises `Refused`."""
        self._check_path("data.path", request.data.path)
        if request.checkpoint is not None:
            accepted = await self._of_checkpoint(request, request.checkpoint)
        else:
            accepted = await self._of_server(request)
        if not accepted.plan.problems:
            raise Refused("context_length", accepted.plan.emptiness)
        known = self.get(accepted.plan.eval_id)
        if known is not None and known.state in ("queued", "running"):
            return known
        asked = _asked(request, accepted, self._store.next_number())
        self._store.keep(asked)
        self._turns.add(accepted)
        return asked.status

    async def _of_server(self, request: EvalRequest) -> _Accepted:
        await self._current.refresh()
        job, announced = self._current.job, self._current.announced
        if job is None or announced is None:
            raise Refused("replica", "no job has given a server a policy yet", status=409)
        replica = await self._server(request.replica, announced.job_id)
        assert replica.policy_version is not None  # `_server` chose it for that
        stem = f"x{secrets.token_hex(4)}"
        named = (announced.job_id, replica.policy_version, stem)
        policy = Policy.of_job(job)
        plan = await self._plan(request, policy, *named)
        return _Accepted(plan, request.deadline_s, replica=replica.name, policy=policy)

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
        """Carry out what an earlier process left, then what comes, one at a time, until `stop`.

        A stop lets the samples in progress end, within `drain_s`; the rest comes later.
        """
        self._stop = stop
        await self._take_up()
        await self._turns.run(stop)

    async def _take_up(self) -> None:
        for asked in self._store.all():
            if asked.status.state not in ("queued", "running"):
                continue
            try:
                self._turns.add(await self._again(asked))
            except (Refused, EvaluationFailed) as err:
                self._change(asked.status.eval_id, state="failed", error=str(err))

    async def _again(self, asked: Asked) -> _Accepted:
        """As it was accepted; another policy than that one is never put in its place."""
        request = asked.request
        if asked.attempts >= MAX_ATTEMPTS:
            raise EvaluationFailed(f"the evaluator ended {asked.attempts} times while it was at it")
        if request.checkpoint is not None:
            accepted = await self._of_checkpoint(request, request.checkpoint)
            if accepted.plan.eval_id != asked.status.eval_id:
                raise EvaluationFailed(f"{request.checkpoint} has changed since it was asked for")
            return accepted
        assert asked.policy is not None  # `_of_server` gave one
        named = (asked.job_id, asked.status.policy_version, asked.stem)
        plan = await self._plan(request, asked.policy, *named)
        return _Accepted(plan, request.deadline_s, asked.status.replica, asked.policy)

    async def _carry_out(self, accepted: _Accepted) -> None:
        plan = _due(accepted.plan, accepted.within_s)
        self._begin(plan.eval_id)
        try:
            async with self._sampler(plan, accepted) as sampler:
                result = await self._runner.run(
                    plan,
                    sampler=sampler,
                    graders=reward_servers(self._redis),
                    stop=self._stop,
                    progress=lambda done, _: self._store.note_progress(plan.eval_id, done),
                )
        except Retryable:
            assert self._stop.is_set(), "only a stop interrupts an evaluation"
            self._hand_back(plan.eval_id)
        except (EvaluationFailed, DeadlineExceeded, HttpFailed, OSError) as err:
            log.warning("requested_evaluation_failed", eval_id=plan.eval_id, error=str(err))
            self._change(plan.eval_id, state="failed", error=str(err))
        else:
            done = len(plan.problems)
            self._change(plan.eval_id, state="finished", result=result, problems_done=done)

    @contextlib.asynccontextmanager
    async def _sampler(self, plan: Plan, accepted: _Accepted) -> AsyncIterator[Address]:
        if accepted.checkpoint is None:
            yield named_server(self._redis, plan, accepted.replica)
            return
        async with (
            whole(accepted.checkpoint, self._store.scratch(plan.eval_id)) as checkpoint,
            serving(
                checkpoint,
                self._http,
                context_length=plan.longest,
                max_running_requests=plan.max_running_requests,
                deadline_s=plan.deadline_s,
            ) as url,
        ):
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

    def _begin(self, eval_id: str) -> None:
        asked = self._store.get(eval_id)
        assert asked is not None  # what is queued is kept
        status = asked.status.model_copy(update={"state": "running"})
        attempts = asked.attempts + 1
        self._store.keep(asked.model_copy(update={"status": status, "attempts": attempts}))

    def _hand_back(self, eval_id: str) -> None:
        """A stop is nobody's fault: it does not count as an attempt."""
        self._change(eval_id, state="queued")
        asked = self._store.get(eval_id)
        assert asked is not None  # just changed
        self._store.keep(asked.model_copy(update={"attempts": asked.attempts - 1}))

    def _change(self, eval_id: str, **fields: Any) -> None:
        asked = self._store.get(eval_id)
        assert asked is not None  # what is queued is kept
        status = asked.status.model_copy(update=fields)
        self._store.keep(asked.model_copy(update={"status": status}))


def _asked(request: EvalRequest, accepted: _Accepted, number: int) -> Asked:
    plan = accepted.plan
    status = EvalStatus(
        eval_id=plan.eval_id,
        state="queued",
        suite=plan.suite,
        replica=accepted.replica,
        policy_version=plan.policy_version,
        problems=len(plan.problems),
    )
    return Asked(
        number=number,
        request=request,
        status=status,
        job_id=plan.job_id,
        stem=plan.stem,
        policy=accepted.policy,
    )


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
