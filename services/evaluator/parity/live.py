"""Parity of two running services: the sampler generates, both score the same tokens, one version.

    rollout /v1/generate ─> tokens, log p while sampling ─┬─> rollout /v1/score  (against itself)
                                                          └─> trainer /v1/score  (against training)

While a job runs the trainer moves on; an answer for another version starts the round again, with
the version that is served then, until the deadline.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from services.evaluator.parity.report import Run
from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.messages import SamplingParams, VersionSpan
from shared.parity.scores import ScoredSequence

TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504)
RETRY_S = 0.25
Answer = TypeVar("Answer", bound=BaseModel)
NO_WALK = (
    "no layer walk: the services expose log-probabilities only; compare two checkpoints with "
    "`parity A B --walk`"
)


class ParityFailed(TandemError):
    """The services cannot be compared, however often they are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """Whom to compare on what. Either `prompts` are completed, or `sequences` scored as they are.

    `policy_version` None takes what the sampler serves.
    """

    rollout_url: str
    trainer_url: str
    prompts: Sequence[Sequence[int]] = ()
    sequences: Sequence[Sequence[int]] = ()
    num_samples: int = 4
    sampling: SamplingParams
    seed: int = 0
    policy_version: int | None = None
    within_s: float = 120.0


class _Sample(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str
    version_spans: list[VersionSpan]


class _Generated(BaseModel):
    policy_version: int
    results: list[list[_Sample]]


class _Scored(BaseModel):
    policy_version: int
    logprobs: list[list[float | None]]  # what is not finite is null in JSON


class _OtherVersion(TandemError):
    """This round met two versions, or a service that cannot answer now."""


async def run_live(http: HttpClient, plan: LivePlan) -> Run:
    """One complete round of one version. `http` must not retry by itself.

    Raises `DeadlineExceeded` naming the last obstacle, `ParityFailed` for what cannot become right.
    """
    began_s = time.monotonic()
    round_ = _Round(http, plan, began_s + plan.within_s)
    while True:
        try:
            run = await round_.run()
        except _OtherVersion as err:
            if time.monotonic() + RETRY_S > round_.deadline_s:
                what = f"sampler and trainer to score one version ({err})"
                raise DeadlineExceeded(what, plan.within_s) from err
            await asyncio.sleep(RETRY_S)
        else:
            return run


class _Round:
    def __init__(self, http: HttpClient, plan: LivePlan, deadline_s: float) -> None:
        self._http, self._plan = http, plan
        self.deadline_s = deadline_s

    async def run(self) -> Run:
        plan, began_s = self._plan, time.monotonic()
        version = await self._version()
        sampled = await self._generate(version) if plan.prompts else []
        sequences = [tokens for tokens, _, _ in sampled] or [list(s) for s in plan.sequences]
        if not sequences:
            raise ParityFailed("every completion is empty: there is no token to compare")
        ours, theirs = await asyncio.gather(
            self._score(plan.rollout_url, "sampler", version, sequences),
            self._score(plan.trainer_url, "trainer", version, sequences),
        )
        return Run(
            ours=f"sampler {plan.rollout_url}",
            theirs=f"trainer {plan.trainer_url}",
            policy_version=version,
            temperature=plan.sampling.temperature,
            sampled_by_ours=bool(sampled),
            seconds=time.monotonic() - began_s,
            **_compared(sampled, sequences, ours, theirs),
        )

    async def _version(self) -> int:
        """The version to compare: the one asked for, or what the sampler serves."""
        if self._plan.policy_version is not None:
            return self._plan.policy_version
        info = await self._ask("GET", f"{self._plan.rollout_url}/v1/info", None, "the sampler")
        version = info.get("policy_version") if isinstance(info, dict) else None
        if version is None:
            raise _OtherVersion("the sampler has no weights yet")
        return int(version)

    async def _generate(self, version: int) -> list[tuple[list[int], int, list[float]]]:
        """(prompt and response, length of the prompt, log p while sampling) of each completion."""
        plan = self._plan
        body = {
            "prompts": [{"token_ids": list(prompt)} for prompt in plan.prompts],
            "num_samples": plan.num_samples,
            "sampling": plan.sampling.model_dump(exclude_unset=True),
            "seed": plan.seed,
            "policy_version": version,
            "timeout_s": self._left_s(),
        }
        url = f"{plan.rollout_url}/v1/generate"
        answer = _read(_Generated, await self._ask("POST", url, body, "the sampler"), url)
        spans = {s.policy_version for r in answer.results for one in r for s in one.version_spans}
        cut_off = any(one.finish_reason == "abort" for r in answer.results for one in r)
        if answer.policy_version != version or cut_off or not spans <= {version}:
            raise _OtherVersion(f"the sampler changed from version {version} while sampling")
        return [
            ([*prompt, *one.token_ids], len(prompt), _numbers(one.logprobs))
            for prompt, samples in zip(plan.prompts, answer.results, strict=True)
            for one in samples
            if one.token_ids
        ]

    async def _score(
        self, base_url: str, who: str, version: int, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        body = {
            "sequences": [list(sequence) for sequence in sequences],
            "temperature": self._plan.sampling.temperature,
            "policy_version": version,
            "timeout_s": self._left_s(),
        }
        url = f"{base_url}/v1/score"
        answer = _read(_Scored, await self._ask("POST", url, body, f"the {who}"), url)
        if answer.policy_version != version:
            raise _OtherVersion(f"the {who} scored version {answer.policy_version}, not {version}")
        lengths = [len(values) for values in answer.logprobs]
        if lengths != [len(sequence) - 1 for sequence in sequences]:
            raise ParityFailed(f"{url}: {lengths} log-probabilities do not fit the sequences")
        return [_numbers(values) for values in answer.logprobs]

    async def _ask(self, method: str, url: str, body: Any, who: str) -> Any:
        try:
            return await self._http.request(method, url, json=body, timeout_s=self._left_s())
        except HttpFailed as err:
            if err.status is not None and err.status not in TEMPORARY:
                raise ParityFailed(f"{who} refuses: {err}") from err
            raise _OtherVersion(f"{who}: {err}") from err

    def _left_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.1)


def _compared(
    sampled: Sequence[tuple[list[int], int, list[float]]],
    sequences: Sequence[list[int]],
    ours: Sequence[list[float]],
    theirs: Sequence[list[float]],
) -> dict[str, Any]:
    """Sampled tokens are compared by what the sampler recorded: training sees those values."""
    if not sampled:
        pairs = zip(sequences, ours, theirs, strict=True)
        return {"sequences": [_sequence(tokens, 1, a, b) for tokens, a, b in pairs]}
    compared, decoding = [], []
    for (tokens, first, recorded), own, other in zip(sampled, ours, theirs, strict=True):
        compared.append(_sequence(tokens, first, recorded, other[first - 1 :]))
        decoding.append(_sequence(tokens, first, recorded, own[first - 1 :]))
    return {"sequences": compared, "decoding": decoding}


def _sequence(
    tokens: list[int], first: int, ours: list[float], theirs: list[float]
) -> ScoredSequence:
    return ScoredSequence(tuple(tokens), first, np.array(ours), np.array(theirs))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _read(kind: type[Answer], answer: Any, url: str) -> Answer:
    try:
        return kind.model_validate(answer)
    except ValidationError as err:
        raise ParityFailed(f"{url}: the answer cannot be read: {err.errors()[0]['msg']}") from err
