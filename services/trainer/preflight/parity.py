"""Is what a server samples what the ranks train? Asked before the first step, server by server.

The server completes a few prompts; the ranks score the same tokens, rounding as the server does
(there a difference is a mistake) and as they train (there it is what training will see). A layer
walk says which sub-module departs.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ValidationError

from services.trainer.preflight.findings import ServerParity
from shared.errors import HttpFailed, PartialModel, Rejected, TandemError
from shared.http import HttpClient
from shared.job import Job
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.judge import MARGINS
from shared.parity.live_walk import walk_sides
from shared.parity.offline_request import WalkResult
from shared.parity.samples import Sample, check_counts
from shared.parity.trace import (
    MAX_TRACE_TOKENS,
    MEDIA_TYPE,
    Traced,
    TraceRequest,
    TraceRounding,
)

NO_TRACE = (404, 405, 501)
MAX_RESPONSE_TOKENS = 48
MAX_WALK_TOKENS = 256
SAMPLES_PER_PROMPT = 2


class Trained(Protocol):
    """The ranks."""

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        rounding: TraceRounding = "own",
    ) -> list[list[float]]: ...

    async def trace(self, request: bytes) -> bytes: ...


class ParityUnknown(TandemError):
    """A server answers nothing that can be compared."""


class _Generated(BaseModel):
    policy_version: int
    results: list[list[Sample]]


class ParityCheck:
    """Of one version; what the ranks say is asked once for all servers."""

    def __init__(
        self,
        http: HttpClient,
        ranks: Trained,
        *,
        job: Job,
        arch: Architecture,
        prompts: Sequence[Sequence[int]],
        policy_version: int,
        timeout_s: float,
    ) -> None:
        self._http, self._ranks, self._job, self._arch = http, ranks, job, arch
        self._prompts = [list(prompt) for prompt in prompts]
        self.policy_version, self._timeout_s = policy_version, timeout_s
        self._traced: dict[bytes, Traced] = {}

    async def of(self, server: str, url: str) -> ServerParity:
        """Raises `ParityUnknown` for answers that cannot be read, `HttpFailed` for none."""
        tokens, sampled = await self._sampled(url)
        temperature = self._job.sampling.temperature
        try:
            alike = await self._ranks.score(tokens, temperature=temperature, rounding="sampler")
            own = await self._ranks.score(tokens, temperature=temperature)
        except ValueError as err:  # as a token that is not in the vocabulary
            raise ParityUnknown(f"{url}: the ranks cannot score what it sampled: {err}") from err
        delta_alike = _deltas(sampled, alike)
        walked = await self._walk(url)
        return ServerParity(
            server=server,
            num_tokens=len(delta_alike),
            alike_mean=float(delta_alike.mean()),
            alike_max=float(delta_alike.max()),
            own_mean=float(_deltas(sampled, own).mean()),
            walked=None if walked is None else walked.verdict,
            departs_at=None if walked is None or walked.first is None else walked.first,
        )

    async def _sampled(self, url: str) -> tuple[list[list[int]], list[list[float]]]:
        """Prompt and response of every completion, and what was recorded of the response."""
        sampling = SamplingParams(
            temperature=self._job.sampling.temperature,
            max_response_tokens=min(MAX_RESPONSE_TOKENS, self._job.sampling.max_response_tokens),
        )
        body = {
            "prompts": [{"token_ids": prompt} for prompt in self._prompts],
            "num_samples": SAMPLES_PER_PROMPT,
            "sampling": sampling.model_dump(exclude_unset=True),
            "seed": self._job.seed % 2**31,
            "policy_version": self.policy_version,
            "timeout_s": self._timeout_s,
        }
        where = f"{url}/v1/generate"
        answer = await self._http.post(where, body, timeout_s=self._timeout_s)
        try:
            generated = _Generated.model_validate(answer)
            check_counts(
                generated.results, num_prompts=len(self._prompts), num_samples=SAMPLES_PER_PROMPT
            )
        except ValidationError as err:
            raise ParityUnknown(f"{where}: {err.errors()[0]['msg']}") from err
        except ValueError as err:
            raise ParityUnknown(f"{where}: {err}") from err
        pairs = [
            ([*prompt, *one.token_ids], [np.nan if p is None else p for p in one.logprobs])
            for prompt, samples in zip(self._prompts, generated.results, strict=True)
            for one in samples
            if one.token_ids
        ]
        if not pairs:
            raise ParityUnknown(f"{where}: every completion is empty")
        return [tokens for tokens, _ in pairs], [logprobs for _, logprobs in pairs]

    async def _walk(self, url: str) -> WalkResult | None:
        """Over prompts one after the other, as long as a context is."""

        async def sampler(request: TraceRequest) -> Traced:
            return await _trace(self._http, url, request, self._timeout_s)

        limit = min(MAX_WALK_TOKENS, self._job.sampling.context_length, MAX_TRACE_TOKENS)
        tokens = [token for prompt in self._prompts for token in prompt]
        tokens = (tokens * (limit // len(tokens) + 1))[:limit]
        try:
            found = await walk_sides(
                self._trace_ranks,
                sampler,
                self._arch,
                tokens,
                margin=MARGINS[self._job.actor.dtype],
                policy_version=self.policy_version,
            )
        except _NoStates:
            return None
        except ValueError as err:
            raise ParityUnknown(f"the layer walk with {url}: {err}") from err
        return found.result

    async def _trace_ranks(self, request: TraceRequest) -> Traced:
        body = request.pack()
        if body not in self._traced:
            try:
                traced = await self._ranks.trace(body)
            except PartialModel as err:
                raise _NoStates(str(err)) from err
            found = await asyncio.to_thread(Traced.unpack, traced)
            # Ranks know no versions; now they hold the one that is checked.
            held = {"policy_version": self.policy_version}
            self._traced[body] = found.model_copy(update=held)
        return self._traced[body]


class _NoStates(TandemError):
    """A side has no inner states to show."""


async def _trace(http: HttpClient, url: str, request: TraceRequest, timeout_s: float) -> Traced:
    body = await asyncio.to_thread(request.model_copy(update={"timeout_s": timeout_s}).pack)
    where = f"{url}/v1/trace"
    headers = {"content-type": MEDIA_TYPE}
    try:
        answer: Any = await http.request(
            "POST", where, content=body, headers=headers, timeout_s=timeout_s
        )
        return await asyncio.to_thread(Traced.unpack, answer)
    except HttpFailed as err:
        if err.status in NO_TRACE:
            raise _NoStates(where) from err
        raise
    except Rejected as err:
        raise ParityUnknown(f"{where}: {err}") from err


def _deltas(sampled: list[list[float]], scored: list[list[float]]) -> np.ndarray:
    """|Δ log p| of all response tokens; what is not finite differs without bound."""
    ours = np.concatenate([np.array(row, np.float64) for row in sampled])
    theirs = np.concatenate(
        [np.array(row[len(row) - len(s) :]) for row, s in zip(scored, sampled, strict=True)]
    )
    delta: np.ndarray = np.abs(ours - theirs)
    delta[~np.isfinite(delta)] = np.inf
    return delta
