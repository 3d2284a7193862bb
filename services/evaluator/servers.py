"""The servers that an evaluation uses: one pinned sampler, any grader.

A server that is away, restarting or still at another version is asked again until the deadline;
what it answers is used only if every token is of the pinned version.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from redis.asyncio import Redis

from services.evaluator.plan import EvaluationFailed, Plan, Problem
from shared import topology
from shared.chat import graded_text
from shared.errors import DeadlineExceeded, HttpFailed
from shared.http import HttpClient
from shared.messages import FinishReason, Outcome, VersionSpan
from shared.registry import Replica, live_replicas
from shared.telemetry import counter, now_s

Address = Callable[[], Awaitable[str | None]]
"""The server to ask now; None while there is none."""

REMEMBERED_S, ABSENCE_S = 1.0, 0.1  # how long an address is known, and that there is none
T = TypeVar("T")

TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504)


class Completion(BaseModel):
    """One sample as a rollout server gives it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    version_spans: list[VersionSpan]


_OUTCOMES = TypeAdapter(list[Outcome])
_COMPLETIONS = TypeAdapter(list[list[Completion]])


class PinnedSampler:
    """Samples one plan's problems from the server that `address` names."""

    def __init__(
        self, http: HttpClient, plan: Plan, address: Address, *, request_s: float, retry_s: float
    ) -> None:
        self._plan = plan
        self._asking = _Asking(http, address, plan.deadline_s, request_s, retry_s)

    async def sample(self, problem: Problem, index: int) -> Completion:
        """One completion of a problem, sampled by the plan's version alone."""
        plan = self._plan
        what = f"version {plan.policy_version} to sample row {problem.row}.{index}"
        while True:
            answer = await self._asking.post(
                "/v1/generate",
                {
                    "prompts": [{"token_ids": problem.token_ids}],
                    "num_samples": 1,
                    "sampling": plan.sampling.model_dump(),
                    "seed": plan.seed_of(problem, index),
                    "policy_version": plan.policy_version,
                    "timeout_s": self._asking.timeout_s,
                },
                what=what,
            )
            if (completion := self._usable(answer, problem)) is not None:
                return completion
            await self._asking.pause(what, "samples of another version, or cut off")

    def _usable(self, answer: Any, problem: Problem) -> Completion | None:
        """The completion, or None if other weights had a part in it."""
        version = self._plan.policy_version
        try:
            ((completion,),) = _COMPLETIONS.validate_python(answer["results"])
        except (ValidationError, ValueError, KeyError, TypeError) as err:
            text = f"row {problem.row}: an answer of /v1/generate cannot be read: {err}"
            raise EvaluationFailed(text) from err
        if answer.get("policy_version") != version or completion.finish_reason == "abort":
            return None
        spans = {span.policy_version for span in completion.version_spans}
        return completion if spans <= {version} else None


class Graders:
    """Grades at any of the live reward servers, in turn."""

    def __init__(
        self, http: HttpClient, plan: Plan, address: Address, *, request_s: float, retry_s: float
    ) -> None:
        self._plan = plan
        self._asking = _Asking(http, address, plan.deadline_s, request_s, retry_s)

    async def grade(self, problem: Problem, texts: list[str]) -> list[Outcome]:
        """One outcome per response text."""
        plan = self._plan
        item = {
            "gold": problem.gold,
            "grader": plan.grader,
            "timeout_s": plan.grading_timeout_s,
        }
        answer = await self._asking.post(
            "/v1/grade",
            {"items": [{"response": graded_text(problem.prompt, one), **item} for one in texts]},
            what=f"a reward server to grade row {problem.row}",
        )
        try:
            outcomes = _OUTCOMES.validate_python(answer["outcomes"])
        except (ValidationError, KeyError, TypeError) as err:
            text = f"row {problem.row}: an answer of /v1/grade cannot be read: {err}"
            raise EvaluationFailed(text) from err
        if len(outcomes) != len(texts):
            found = f"{len(outcomes)} outcomes for {len(texts)} responses"
            raise EvaluationFailed(f"row {problem.row}: {found}")
        return outcomes


class _Asking:
    """POST until there is an answer, the request is refused, or the deadline is there."""

    def __init__(
        self,
        http: HttpClient,
        address: Address,
        deadline_s: float,
        request_s: float,
        retry_s: float,
    ) -> None:
        self._http = http
        self._address = address
        self._deadline_s = deadline_s
        self._request_s = request_s
        self._retry_s = retry_s
        self._began_s = now_s()
        self._retries = counter("eval_retries_total", "Requests of evaluations that were repeated.")

    @property
    def timeout_s(self) -> float:
        """What a request that starts now may take."""
        return max(min(self._request_s, self._deadline_s - now_s()), 0.1)

    async def post(self, path: str, body: dict[str, Any], *, what: str) -> Any:
        while True:
            url = await self._address()
            if url is None:
                await self.pause(what, "no such server is registered")
                continue
            try:
                return await self._http.post(f"{url}{path}", body, timeout_s=self.timeout_s)
            except HttpFailed as err:
                if err.status is not None and err.status not in TEMPORARY:
                    raise EvaluationFailed(str(err)) from err
                await self.pause(what, str(err))

    async def pause(self, what: str, reason: str) -> None:
        """Wait a moment, or raise `DeadlineExceeded` with what was waited for and why."""
        if now_s() + self._retry_s > self._deadline_s:
            raise DeadlineExceeded(f"{what} ({reason})", round(now_s() - self._began_s, 1))
        self._retries.inc()
        await asyncio.sleep(self._retry_s)


def held_server(redis: Redis, plan: Plan) -> Address:
    """The server that the trainer holds at the plan's version, once it serves that."""

    async def address() -> str | None:
        holds: Any = redis.hgetall(topology.holds(plan.job_id))
        wanted = str(plan.policy_version).encode()
        held = {name.decode() for name, version in (await holds).items() if version == wanted}
        for replica in await live_replicas(redis, "rollout"):
            if replica.name in held and _serves(replica, plan):
                return replica.url
        return None

    return _remembered(address)


def named_server(redis: Redis, plan: Plan, name: str) -> Address:
    """The server of that name while it serves the plan's version; nobody holds it there."""

    async def address() -> str | None:
        for replica in await live_replicas(redis, "rollout"):
            if replica.name != name or replica.policy_version is None:
                continue
            if not _serves(replica, plan):
                now = f"version {replica.policy_version} of job {replica.job_id}"
                raise EvaluationFailed(f"{name} serves {now}, {plan.policy_version} was evaluated")
            return replica.url
        return None

    return _remembered(address)


def fixed_server(url: str) -> Address:
    """A server that was started for one evaluation."""

    async def address() -> str | None:
        return url

    return address


def reward_servers(redis: Redis) -> Address:
    """The live reward servers, in turn."""
    turn = itertools.count()

    async def live() -> list[str]:
        return [replica.url for replica in await live_replicas(redis, "reward")]

    known = _remembered(live)

    async def address() -> str | None:
        urls = await known()
        return urls[next(turn) % len(urls)] if urls else None

    return address


def _serves(replica: Replica, plan: Plan) -> bool:
    return replica.job_id == plan.job_id and replica.policy_version == plan.policy_version


def _remembered(ask: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    """Ask the registry now and then; hundreds of samples share the answer.

    And the question: were they all to ask once it is old, the broker's connections would run out.
    """
    known: tuple[float, T] | None = None
    one = asyncio.Lock()

    async def remembered() -> T:
        nonlocal known
        async with one:
            if known is None or time.monotonic() >= known[0]:
                found = await ask()
                known = (time.monotonic() + (REMEMBERED_S if found else ABSENCE_S), found)
            return known[1]

    return remembered
