"""A grader that answers over HTTP, somewhere else: bounded in time, retried, cut off when it fails.

POST {"items": [{"response", "gold"}]} -> {"outcomes": [...]}, as this service's own /v1/grade.
Whatever goes wrong is an `error` for the responses in question, never a zero.

closed ──max_failures in a row──> open: errors at once ──after open_s──> one trial ──> closed | open
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog
from pydantic import BaseModel, Field, ValidationError

from services.reward.outcomes import read_outcome
from shared.config import Part
from shared.errors import HttpFailed
from shared.http import HttpClient
from shared.messages import GraderError, Outcome
from shared.refusals import fault

log = structlog.get_logger()


class RemoteConfig(Part):
    """One remote grader."""

    url: str = Field(pattern=r"^https?://")
    """Where it is asked."""
    deadline_s: float = Field(30.0, gt=0)
    """For one request, its repetitions included."""
    attempts: int = Field(3, gt=0, le=10)
    """How often a request that fails is made."""
    max_items: int = Field(64, gt=0)
    """Responses sent at once."""
    max_in_flight: int = Field(16, gt=0)
    """Requests open at the same time."""
    max_failures: int = Field(5, gt=0)
    """Requests that fail in a row before it is not asked any more."""
    open_s: float = Field(30.0, gt=0)
    """How long it is not asked then."""


class _Answer(BaseModel):
    outcomes: list[Any]


class RemoteGrader:
    """`grade` never raises: what fails is an outcome."""

    def __init__(self, name: str, config: RemoteConfig) -> None:
        self._name = name
        self._config = config
        self._http = HttpClient(attempts=config.attempts, timeout_s=config.deadline_s)
        self._places = asyncio.Semaphore(config.max_in_flight)
        self._num_failures = 0
        self._open_until_s = 0.0

    async def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """One outcome per (response, gold)."""
        size = self._config.max_items
        parts = [pairs[begin : begin + size] for begin in range(0, len(pairs), size)]
        answers = await asyncio.gather(*(self._part(part) for part in parts))
        return [outcome for answer in answers for outcome in answer]

    async def close(self) -> None:
        await self._http.close()

    async def _part(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        async with self._places:
            if (wait_s := self._open_until_s - time.monotonic()) > 0:
                return self._errors(pairs, f"is not asked for another {wait_s:.0f} s")
            if self._num_failures >= self._config.max_failures:  # this request is the trial
                self._open_until_s = time.monotonic() + self._config.deadline_s
            try:
                outcomes = await self._ask(pairs)
            except ValidationError as err:
                return self._errors(pairs, self._failed(f"no list of outcomes: {fault(err)}"))
            except (HttpFailed, ValueError) as err:
                return self._errors(pairs, self._failed(str(err)))
            except TimeoutError:
                within = f"gave no answer within {self._config.deadline_s:g} s"
                return self._errors(pairs, self._failed(within))
            self._num_failures, self._open_until_s = 0, 0.0
            return outcomes

    async def _ask(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        body = {"items": [{"response": response, "gold": gold} for response, gold in pairs]}
        async with asyncio.timeout(self._config.deadline_s):
            answer = await self._http.post(self._config.url, body, idempotent=True)
        outcomes = _Answer.model_validate(answer).outcomes
        if len(outcomes) != len(pairs):
            raise ValueError(f"gave {len(outcomes)} outcomes for {len(pairs)} responses")
        return [read_outcome(one) for one in outcomes]

    def _failed(self, reason: str) -> str:
        self._num_failures += 1
        if self._num_failures >= self._config.max_failures:
            self._open_until_s = time.monotonic() + self._config.open_s
            log.warning("remote_grader_cut_off", grader=self._name, reason=reason)
        return reason

    def _errors(self, pairs: Sequence[tuple[str, str]], reason: str) -> list[Outcome]:
        return [GraderError(reason=f"remote grader {self._name}: {reason}"[:300]) for _ in pairs]
