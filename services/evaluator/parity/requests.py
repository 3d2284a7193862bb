"""Parity runs that people ask for, one after the other, the last hundred remembered."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator
from redis.asyncio import Redis

from services.evaluator.parity.live import LivePlan, run_live
from services.evaluator.parity.report import ParityStatus, make_report
from services.evaluator.requests import Refused
from services.evaluator.turns import Turns
from shared.current_job import CurrentJob
from shared.data import DataError, draw_order, load_rows
from shared.errors import TandemError
from shared.http import HttpClient
from shared.job import Job, expand_path
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.judge import MARGINS, Margin
from shared.parity.scores import Bounds
from shared.registry import live_replicas
from shared.tokenizer import CheckpointTokenizer

log = structlog.get_logger()

KEPT = 100
DEFAULT_PROMPTS = 8
MAX_SEQUENCES = 256


class ParityBounds(BaseModel):
    """What still passes; null does not bound."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mean: float | None = Field(0.04, ge=0)
    """Of the mean |Δ log p|."""
    p99: float | None = Field(None, ge=0)
    """Of its 99th percentile."""
    max: float | None = Field(None, ge=0)
    """Of the largest."""
    k3: float | None = Field(None, ge=0)
    """Of k3, the estimate of the KL divergence."""


class ParityRequest(BaseModel):
    """POST /v1/parity. Without prompts or sequences the first prompts of the job are taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rollout_url: str | None = Field(None, pattern="^https?://")
    """The sampler; default: the first server of the active job that serves a version."""
    trainer_url: str | None = Field(None, pattern="^https?://")
    """The trainer; default: that of the active job."""
    prompts: list[str] | None = Field(None, min_length=1, max_length=MAX_SEQUENCES)
    """Texts for the sampler to complete."""
    sequences: list[list[int]] | None = Field(None, min_length=1, max_length=MAX_SEQUENCES)
    """Tokens to score as they are; nothing is sampled."""
    num_samples: int = Field(4, gt=0, le=64)
    """Completions of each prompt."""
    max_response_tokens: int = Field(64, gt=0)
    """Of each completion."""
    temperature: float = Field(1.0, gt=0)
    """At which they are sampled and scored."""
    seed: int = Field(0, ge=0)
    """Of the samples."""
    policy_version: int | None = Field(None, ge=0)
    """Compare exactly this version; default: the one that the trainer holds."""
    walk: bool = False
    """Name the first layer and sub-module that departs, where both sides show inner states."""
    tolerance: float | None = Field(None, gt=0)
    """Of the walk, relative; default: what the trainer's dtype allows."""
    bounds: ParityBounds = ParityBounds()
    """What still passes."""
    deadline_s: float = Field(120.0, gt=0, le=3600)
    """Seconds for all of it."""

    @model_validator(mode="after")
    def _one_kind_of_tokens(self) -> Self:
        if self.prompts is not None and self.sequences is not None:
            raise ValueError("give prompts or sequences, not both")
        short = [i for i, tokens in enumerate(self.sequences or []) if len(tokens) < 2]
        if short:
            raise ValueError(f"sequence {short[0]} has fewer than 2 tokens: nothing to score")
        return self


@dataclass(frozen=True, slots=True)
class _Accepted:
    parity_id: str
    request: ParityRequest
    plan: LivePlan
    tokenizer: CheckpointTokenizer | None


class ParityRuns:
    """Accepts requests, carries them out in turn, remembers the last hundred."""

    def __init__(self, redis: Redis, http: HttpClient, current: CurrentJob) -> None:
        self._redis, self._http, self._current = redis, http, current
        self._turns: Turns[_Accepted] = Turns(self._carry_out, lambda _: None, drain_s=0.0)
        self._statuses: OrderedDict[str, ParityStatus] = OrderedDict()

    def all(self) -> list[ParityStatus]:
        """Oldest first."""
        return list(self._statuses.values())

    def get(self, parity_id: str) -> ParityStatus | None:
        return self._statuses.get(parity_id)

    async def submit(self, request: ParityRequest) -> ParityStatus:
        """Find the services and the tokens, and queue the run; raises `Refused`."""
        await self._current.refresh()
        job = self._current.job
        tokenizer = await _tokenizer(job)
        plan = LivePlan(
            rollout_url=(request.rollout_url or await self._sampler()).rstrip("/"),
            trainer_url=(request.trainer_url or self._trainer()).rstrip("/"),
            prompts=await _prompts(request, job, tokenizer),
            sequences=request.sequences or (),
            num_samples=request.num_samples,
            sampling=_sampling(request, tokenizer),
            seed=request.seed,
            policy_version=request.policy_version,
            arch=await _architecture(job),
            margin=_margin(request, job),
            within_s=request.deadline_s,
        )
        status = ParityStatus(parity_id=f"parity-{secrets.token_hex(4)}", state="queued")
        self._set(status)
        self._turns.add(_Accepted(status.parity_id, request, plan, tokenizer))
        return status

    async def run(self, stop: asyncio.Event) -> None:
        """Carry out what is queued, one at a time, until `stop`, which ends the one in progress.

        Its result would be kept in memory alone, and it may wait for a sampler for minutes.
        """
        await self._turns.run(stop)

    async def _carry_out(self, accepted: _Accepted) -> None:
        parity_id = accepted.parity_id
        self._set(ParityStatus(parity_id=parity_id, state="running"))
        try:
            found = await run_live(self._http, accepted.plan)
        except TandemError as err:
            log.warning("parity_failed", parity_id=parity_id, error=str(err))
            self._set(ParityStatus(parity_id=parity_id, state="failed", error=str(err)))
            return
        request, tokenizer = accepted.request, accepted.tokenizer
        bounds = Bounds(**request.bounds.model_dump())
        report = make_report(found, bounds, decode=tokenizer.decode if tokenizer else None)
        figures = report.figures.model_dump(include={"mean", "p99", "max", "num_tokens"})
        log.info("parity_finished", parity_id=parity_id, passed=report.passed, **figures)
        self._set(ParityStatus(parity_id=parity_id, state="finished", report=report))

    async def _sampler(self) -> str:
        found = await live_replicas(self._redis, "rollout")
        serving = [one for one in found if one.policy_version is not None]
        if not serving:
            raise Refused("rollout_url", "no rollout server serves a version", status=409)
        return serving[0].url

    def _trainer(self) -> str:
        if self._current.announced is None:
            raise Refused("trainer_url", "no job has been announced", status=409)
        return self._current.announced.trainer_url

    def _set(self, status: ParityStatus) -> None:
        self._statuses[status.parity_id] = status
        while len(self._statuses) > KEPT:
            self._statuses.popitem(last=False)


async def _tokenizer(job: Job | None) -> CheckpointTokenizer | None:
    """Of the job's checkpoint; None without a job, or where its files are elsewhere."""
    if job is None:
        return None
    try:
        path = expand_path(job.model.rollout_checkpoint)
        return await asyncio.to_thread(CheckpointTokenizer.load, path)
    except (OSError, ValueError) as err:
        log.warning("parity_without_tokenizer", error=str(err))
        return None


async def _architecture(job: Job | None) -> Architecture | None:
    """Of the job's checkpoint; None without a job, or where its files are elsewhere."""
    if job is None:
        return None
    try:
        path = expand_path(job.model.rollout_checkpoint)
        return await asyncio.to_thread(Architecture.load, path)
    except (OSError, ValueError) as err:
        log.warning("parity_without_architecture", error=str(err))
        return None


def _margin(request: ParityRequest, job: Job | None) -> Margin | None:
    if not request.walk:
        return None
    margin, asked = MARGINS["float32" if job is None else job.actor.dtype], request.tolerance
    if asked is None:
        return margin
    return replace(margin, tolerance=asked, coarse=max(margin.coarse, asked), finer={})


async def _prompts(
    request: ParityRequest, job: Job | None, tokenizer: CheckpointTokenizer | None
) -> list[list[int]]:
    if request.sequences is not None:
        return []
    if tokenizer is None:
        raise Refused("prompts", "no checkpoint with a tokenizer is known: give sequences")
    texts: Sequence[str] = request.prompts or ()
    if not texts:
        assert job is not None  # the tokenizer is the job's
        texts = await asyncio.to_thread(_first_prompts, job)
    encoded = [tokenizer.encode(text) for text in texts]
    if empty := [text for text, tokens in zip(texts, encoded, strict=True) if not tokens]:
        raise Refused("prompts", f"{empty[0]!r} has no tokens")
    return encoded


def _first_prompts(job: Job) -> list[str]:
    """What the job draws first."""
    try:
        rows = load_rows(job.data)
    except DataError as err:
        raise Refused("prompts", str(err)) from err
    seed = job.seed if job.data.shuffle else None
    return [rows[draw_order(seed, len(rows), draw)].prompt for draw in range(DEFAULT_PROMPTS)]


def _sampling(request: ParityRequest, tokenizer: CheckpointTokenizer | None) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        max_response_tokens=request.max_response_tokens,
        stop_token_ids=list(tokenizer.stop_token_ids) if tokenizer else [],
    )
