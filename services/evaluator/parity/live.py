"""Parity of two running services: the sampler generates, both score the same tokens, one version.

    rollout /v1/generate ─> tokens, log p while sampling
    trainer /v1/score    ─> log p, and the version that it holds now
    rollout /v1/score    ─> log p of that version, as soon as it is served
    both    /v1/trace    ─> inner states: agreement of choices, and on request the layer walk

While a job runs the trainer moves on, so that it chooses the version: the tokens stay, also if they
were sampled by an older one, which the report then says.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from services.evaluator.parity.inspection import agreement, longest_walk
from services.evaluator.parity.report import Run
from shared.errors import DeadlineExceeded, HttpFailed, Rejected, TandemError
from shared.http import HttpClient
from shared.messages import SamplingParams, VersionSpan
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.judge import Margin
from shared.parity.offline_request import WalkResult
from shared.parity.samples import Sample, check_counts
from shared.parity.scores import ScoredSequence
from shared.parity.trace import MEDIA_TYPE, Traced, TraceRequest

TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504)
RETRY_S = 0.25
SERVED_S = 0.05  # between two looks at the sampler's version
Answer = TypeVar("Answer", bound=BaseModel)
Found = TypeVar("Found")
NO_TRACE = (404, 405, 501)
NO_WALK = (
    "no layer walk: the {who} exposes log-probabilities only, so that no layer of it can be "
    "replaced or looked at; compare its checkpoint with `parity A B --walk`"
)
NO_MODEL = "no layer walk: the model is unknown without a job"


class ParityFailed(TandemError):
    """The services cannot be compared, however often they are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """Whom to compare on what. Either `prompts` are completed, or `sequences` scored as they are.

    `policy_version` None takes what the trainer holds.
    """

    rollout_url: str
    trainer_url: str
    prompts: Sequence[Sequence[int]] = ()
    sequences: Sequence[Sequence[int]] = ()
    num_samples: int = 4
    sampling: SamplingParams
    seed: int = 0
    policy_version: int | None = None
    arch: Architecture | None = None
    """Of both sides; without it no inner states are compared."""
    margin: Margin | None = None
    """What may depart in a layer walk; without it none is made."""
    within_s: float = 120.0


class _Sample(Sample):
    finish_reason: str
    version_spans: list[VersionSpan]


class _Generated(BaseModel):
    policy_version: int
    results: list[list[_Sample]]


class _Scored(BaseModel):
    policy_version: int
    logprobs: list[list[float | None]]  # what is not finite is null in JSON


class _OtherVersion(TandemError):
    """An attempt met two versions, or a service that cannot answer now."""


async def run_live(http: HttpClient, plan: LivePlan) -> Run:
    """Sample once, then score until both sides answer for one version. `http` must not retry.

    Raises `DeadlineExceeded` naming the last obstacle, `ParityFailed` for what cannot become right.
    """
    began_s = time.monotonic()
    asking = _Asking(http, plan, began_s + plan.within_s)
    sampled = await asking.until_done(asking.generate) if plan.prompts else None
    if sampled is not None and not sampled.completions:
        raise ParityFailed("every completion is empty: there is no token to compare")
    tokens = [list(t) for t in plan.sequences]
    if sampled is not None:
        tokens = [completion.token_ids for completion in sampled.completions]
    scored = await asking.until_done(lambda: asking.score_both(tokens))
    inside = await _look_inside(asking, plan, tokens)
    return _run(plan, tokens, sampled, scored, inside, time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class _Completion:
    """Prompt and response, the prompt's length, and what the sampler recorded of the response."""

    token_ids: list[int]
    first: int
    recorded: list[float]


@dataclass(frozen=True, slots=True)
class _SampledBy:
    policy_version: int
    completions: list[_Completion]


@dataclass(frozen=True, slots=True)
class _ScoredBoth:
    policy_version: int
    ours: list[list[float]]
    theirs: list[list[float]]


@dataclass(slots=True)
class _Inside:
    """What inner states say, if there are any."""

    argmax_agreement: float | None = None
    routing_agreement: dict[int, float] | None = None
    walk: WalkResult | None = None
    notes: list[str] = field(default_factory=list)


async def _look_inside(asking: "_Asking", plan: LivePlan, tokens: list[list[int]]) -> _Inside:
    """Agreement and walk; an engine without inner states gets a note instead."""
    inside, arch, margin = _Inside(), plan.arch, plan.margin
    if arch is None:
        inside.notes += [NO_MODEL] if margin is not None else []
        return inside
    sides = (asking.trace_trainer, asking.trace_sampler)
    try:
        found = await asking.until_done(lambda: agreement(*sides, arch, tokens))
        inside.argmax_agreement, inside.routing_agreement = found.argmax, found.routing
        inside.notes.append(
            f"agreement of choices is of version {found.policy_version} over "
            f"{found.num_sequences} sequences"
        )
        if margin is not None:
            walking = partial(longest_walk, *sides, arch, tokens, margin)
            version, inside.walk = await asking.until_done(walking)
            inside.notes.append(
                f"the layer walk is of version {version}, the trainer rounding as its sampler"
            )
    except _NoStates as err:
        inside.notes.append(NO_WALK.format(who=err))
    except ParityFailed as err:
        inside.notes.append(f"inner states could not be compared: {err}")
    except (ValueError, TypeError, LookupError) as err:  # missing, or of other sizes than asked for
        raise ParityFailed(f"the states of the two sides do not fit together: {err!r}") from err
    return inside


class _NoStates(TandemError):
    """The engine named has no inner states to show."""


class _Asking:
    """Requests to both services, repeated until the deadline."""

    def __init__(self, http: HttpClient, plan: LivePlan, deadline_s: float) -> None:
        self._http, self._plan, self._deadline_s = http, plan, deadline_s

    async def until_done(self, attempt: Callable[[], Awaitable[Found]]) -> Found:
        while True:
            try:
                return await attempt()
            except _OtherVersion as err:
                if time.monotonic() + RETRY_S > self._deadline_s:
                    what = f"sampler and trainer to score one version ({err})"
                    raise DeadlineExceeded(what, self._plan.within_s) from err
                await asyncio.sleep(RETRY_S)

    async def generate(self) -> _SampledBy:
        """Completions of one version, those without a token left out."""
        plan, version = self._plan, await self._served()
        if plan.policy_version not in (None, version):
            raise _OtherVersion(f"the sampler serves {version}, not {plan.policy_version}")
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
        try:
            check_counts(
                answer.results, num_prompts=len(plan.prompts), num_samples=plan.num_samples
            )
        except ValueError as err:
            raise ParityFailed(f"{url}: {err}") from err
        samples = [one for result in answer.results for one in result]
        spans = {span.policy_version for one in samples for span in one.version_spans}
        cut_off = any(one.finish_reason == "abort" for one in samples)
        if answer.policy_version != version or cut_off or not spans <= {version}:
            raise _OtherVersion(f"the sampler changed from version {version} while sampling")
        completions = [
            _Completion([*prompt, *one.token_ids], len(prompt), _numbers(one.logprobs))
            for prompt, result in zip(plan.prompts, answer.results, strict=True)
            for one in result
            if one.token_ids
        ]
        return _SampledBy(version, completions)

    async def score_both(self, tokens: list[list[int]]) -> _ScoredBoth:
        """The trainer names the version; the sampler is asked for it once it serves it."""
        plan = self._plan
        if plan.policy_version is not None:
            await self._served()
        version, theirs = await self._score(
            plan.trainer_url, "trainer", tokens, plan.policy_version
        )
        await self._until_served(version)
        _, ours = await self._score(plan.rollout_url, "sampler", tokens, version)
        return _ScoredBoth(version, ours, theirs)

    async def _until_served(self, version: int) -> None:
        while True:
            served = await self._served()
            if served == version:
                return
            if served > version or time.monotonic() + SERVED_S > self._deadline_s:
                raise _OtherVersion(f"the trainer holds version {version}, the sampler {served}")
            await asyncio.sleep(SERVED_S)

    async def _served(self) -> int:
        info = await self._ask("GET", f"{self._plan.rollout_url}/v1/info", None, "the sampler")
        version = info.get("policy_version") if isinstance(info, dict) else None
        if version is None:
            raise _OtherVersion("the sampler has no weights yet")
        if type(version) is not int:
            raise ParityFailed(f"the sampler says that it serves version {version!r}: no number")
        if self._plan.policy_version is not None and version > self._plan.policy_version:
            asked = self._plan.policy_version  # which does not come back
            raise ParityFailed(f"the sampler serves version {version} already, not {asked}")
        return version

    async def _score(
        self, base_url: str, who: str, tokens: list[list[int]], version: int | None
    ) -> tuple[int, list[list[float]]]:
        body = {
            "sequences": tokens,
            "temperature": self._plan.sampling.temperature,
            "policy_version": version,
            "timeout_s": self._left_s(),
        }
        url = f"{base_url}/v1/score"
        answer = _read(_Scored, await self._ask("POST", url, body, f"the {who}"), url)
        if version not in (None, answer.policy_version):
            raise _OtherVersion(f"the {who} scored version {answer.policy_version}, not {version}")
        lengths = [len(values) for values in answer.logprobs]
        if lengths != [len(sequence) - 1 for sequence in tokens]:
            raise ParityFailed(f"{url}: {lengths} log-probabilities do not fit the sequences")
        return answer.policy_version, [_numbers(values) for values in answer.logprobs]

    async def trace_trainer(self, request: TraceRequest) -> Traced:
        """Of the plan's version, or of the one that the trainer holds now."""
        if request.policy_version is None and self._plan.policy_version is not None:
            await self._served()  # or the version is gone
            version = {"policy_version": self._plan.policy_version}
            request = request.model_copy(update=version)
        return await self._trace(self._plan.trainer_url, "trainer", request)

    async def trace_sampler(self, request: TraceRequest) -> Traced:
        """Of the version that the trainer named, as soon as it is served."""
        assert request.policy_version is not None
        await self._until_served(request.policy_version)
        return await self._trace(self._plan.rollout_url, "sampler", request)

    async def _trace(self, base_url: str, who: str, request: TraceRequest) -> Traced:
        left_s = self._left_s()
        body = await asyncio.to_thread(request.model_copy(update={"timeout_s": left_s}).pack)
        url = f"{base_url}/v1/trace"
        try:
            answer = await self._http.request(
                "POST",
                url,
                content=body,
                headers={"content-type": MEDIA_TYPE},
                timeout_s=left_s,
            )
        except HttpFailed as err:
            if err.status in NO_TRACE:
                raise _NoStates(who) from err
            raise self._failure(f"the {who}", err) from err
        try:
            traced = await asyncio.to_thread(Traced.unpack, answer)
        except Rejected as err:
            raise ParityFailed(f"{url}: the answer cannot be read: {err}") from err
        if request.policy_version not in (None, traced.policy_version):
            raise _OtherVersion(f"the {who} traced version {traced.policy_version}")
        return traced

    async def _ask(self, method: str, url: str, body: Any, who: str) -> Any:
        try:
            return await self._http.request(method, url, json=body, timeout_s=self._left_s())
        except HttpFailed as err:
            raise self._failure(who, err) from err

    def _failure(self, who: str, err: HttpFailed) -> TandemError:
        if err.status is not None and err.status not in TEMPORARY:
            return ParityFailed(f"{who} refuses: {err}")
        return _OtherVersion(f"{who}: {err}")

    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.1)


def _run(
    plan: LivePlan,
    tokens: list[list[int]],
    sampled: _SampledBy | None,
    scored: _ScoredBoth,
    inside: _Inside,
    seconds: float,
) -> Run:
    """What training sees of sampled tokens is what the sampler recorded: that is compared, if its
    version is the one that was scored."""
    same = sampled is not None and sampled.policy_version == scored.policy_version
    notes, compared, decoding = [], [], []
    completions: Sequence[_Completion | None] = (
        sampled.completions if sampled else [None] * len(tokens)
    )
    for ids, completion, ours, theirs in zip(
        tokens, completions, scored.ours, scored.theirs, strict=True
    ):
        first = completion.first if completion else 1
        ours, theirs = ours[first - 1 :], theirs[first - 1 :]
        if completion is not None and same:
            decoding.append(_sequence(ids, first, completion.recorded, ours))
            ours = completion.recorded
        compared.append(_sequence(ids, first, ours, theirs))
    if sampled is not None and not same:
        notes.append(f"the tokens were sampled by version {sampled.policy_version}")
    return Run(
        ours=f"sampler {plan.rollout_url}",
        theirs=f"trainer {plan.trainer_url}",
        sequences=compared,
        decoding=decoding,
        sampled_by_ours=same,
        temperature=plan.sampling.temperature,
        policy_version=scored.policy_version,
        argmax_agreement=inside.argmax_agreement,
        routing_agreement=inside.routing_agreement,
        walk=inside.walk,
        notes=[*notes, *inside.notes],
        seconds=seconds,
    )


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
