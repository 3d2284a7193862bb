"""HTTP of a rollout server: sample, score, and the update transaction."""

import asyncio
from typing import Annotated, cast

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.info import ServerInfo
from services.rollout.server import RolloutServer
from services.rollout.serving import Serving
from services.rollout.weights import CommitFailed, NotAsExpected, UpdateConflict, UpdateUnknown
from services.rollout.worker import text_of
from shared.answers import failures
from shared.bodies import limited_body
from shared.errors import ChannelClosed, DeadlineExceeded, Rejected, Retryable
from shared.messages import SamplingParams
from shared.parity.trace import BINARY, MAX_BODY_BYTES, MEDIA_TYPE, TRACE_BODY, TraceRequest
from shared.registry import live_replicas
from shared.rest_parameters import MAX_NUMBER, Version
from shared.spans import span
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, UpdateStatus

router = APIRouter(prefix="/v1")

_NO_ENGINE = failures({503: "no engine, or no weights yet"})
PROBLEMS = _NO_ENGINE | failures(
    {
        409: "that version is not held, or the update is in another state",
        422: "a value is out of bounds; it is named",
        504: "the deadline passed",
    }
)
_EMBEDDED_ONLY = failures({501: "the engine shows log-probabilities only"})
_UPDATE_PROBLEMS = PROBLEMS | failures({404: "no update of that version"})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Prompt(_Body):
    """Token ids or text. Example: {"text": "37+48="}."""

    token_ids: list[TokenId] | None = None
    """The prompt as tokens."""
    text: str | None = None
    """Or as text, which is encoded as it stands."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Prompt":
        if (self.token_ids is None) == (self.text is None):
            raise ValueError("give either token_ids or text")
        return self


class GenerateRequest(_Body):
    """Sample i of prompt j is seeded by (seed, j, i)."""

    prompts: list[Prompt] = Field(min_length=1)
    """What to complete."""
    num_samples: int = Field(1, gt=0)
    """Completions of each."""
    sampling: SamplingParams
    """How they are sampled."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Sample i of prompt j is seeded by (seed, j, i)."""
    policy_version: int | None = Field(None, ge=0, le=MAX_NUMBER)
    """The version that has to be held, or the answer is 409; null: whichever is held."""
    timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds for all of it; the service has an upper bound."""


class VersionSpan(_Body):
    """Example: {"policy_version": 17, "num_tokens": 24}."""

    policy_version: int
    """The version that sampled."""
    num_tokens: int
    """How many tokens it sampled, one after the other."""


class Sample(_Body):
    """One completion."""

    token_ids: list[int]
    """Its tokens, the stop token included."""
    logprobs: list[float]
    """Natural logarithms of the sampled tokens' probabilities, at the sampling temperature."""
    text: str
    """Without the stop token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    version_spans: list[VersionSpan]
    """Which version sampled how many tokens, in order."""


class GenerateResponse(_Body):
    """`results[j][i]` is sample i of prompt j."""

    policy_version: int
    """The version served at the end."""
    results: list[list[Sample]]
    """Samples of each prompt, in order."""


class ScoreRequest(_Body):
    """Example: {"sequences": [[5, 17, 3]]}."""

    sequences: list[Annotated[list[TokenId], Field(min_length=2)]] = Field(min_length=1)
    """Token ids; tokens 1 to T-1 of each are scored."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Log-probabilities are at this temperature."""
    policy_version: int | None = Field(None, ge=0, le=MAX_NUMBER)
    """The version that has to be held, or the answer is 409; null: whichever is held."""
    timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds for all of it; the service has an upper bound."""


class ScoreResponse(_Body):
    """logprobs[i][t] is of token t + 1 of sequence i."""

    policy_version: int
    """The version that scored."""
    logprobs: list[list[float]]
    """T-1 numbers for each sequence of T tokens."""


@router.post("/generate", responses=PROBLEMS, tags=["sampling"])
async def generate(body: GenerateRequest, request: Request) -> GenerateResponse:
    """Complete every prompt `num_samples` times, all under one deadline."""
    server, serving = _server(request), _serving(request)
    _check_generate(body, server)
    requests = [_group_request(body, j, serving) for j in range(len(body.prompts))]
    version = cast(int, serving.policy_version)
    try:
        with span("generate", "requests", prompts=len(requests)):
            async with asyncio.TaskGroup() as tasks:
                sampling = [
                    tasks.create_task(serving.sample(one, timeout_s=body.timeout_s))
                    for one in requests
                ]
    except* (Retryable, ValueError, ChannelClosed, DeadlineExceeded, TimeoutError) as errors:
        raise _first(errors) from errors
    results = [[_sample(one, serving) for one in task.result().values()] for task in sampling]
    return GenerateResponse(policy_version=version, results=results)


@router.post("/score", responses=PROBLEMS, tags=["sampling"])
async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
    """Log-probabilities of given tokens, by the path that samples them."""
    server, serving = _server(request), _serving(request)
    _check_count("sequences", len(body.sequences), server.config.limits.max_prompts)
    answer = await serving.engine.score(
        body.sequences,
        temperature=body.temperature,
        policy_version=body.policy_version,
        timeout_s=min(body.timeout_s, server.config.limits.max_timeout_s),
    )
    logprobs = [np.frombuffer(one, "<f4").tolist() for one in answer["logprobs"]]
    return ScoreResponse(policy_version=answer["policy_version"], logprobs=logprobs)


@router.post(
    "/trace",
    tags=["sampling"],
    response_class=Response,
    openapi_extra=TRACE_BODY,
    responses={
        200: {"description": "a msgpack `Traced`", "content": {MEDIA_TYPE: BINARY}},
        **PROBLEMS,
        **_EMBEDDED_ONLY,
    },
)
async def trace(request: Request) -> Response:
    """Inner states after every sub-module: a msgpack `TraceRequest` in, a `Traced` out."""
    server, serving = _server(request), _embedded(request)
    body = await limited_body(request, MAX_BODY_BYTES)
    asked = await asyncio.to_thread(TraceRequest.unpack, body)
    timeout_s = min(asked.timeout_s, server.config.limits.max_timeout_s)
    traced = await serving.engine.trace(body, timeout_s=timeout_s)
    return Response(traced, media_type=MEDIA_TYPE)


@router.get("/info", tags=["operation"])
async def info(request: Request) -> ServerInfo:
    """Job, version, state and load."""
    return _server(request).info()


@router.post("/pause", responses=PROBLEMS, tags=["operation"])
async def pause(request: Request) -> ServerInfo:
    """Stop decoding where it is; running completions stay in their slots."""
    server = _server(request)
    await _serving(request, needs_weights=False).engine.pause()
    server.paused = True
    server.note_change()
    return server.info()


@router.post("/continue", responses=PROBLEMS, tags=["operation"])
async def go_on(request: Request) -> ServerInfo:
    """Decode again where a pause stopped."""
    server = _server(request)
    await _serving(request, needs_weights=False).engine.go_on()
    server.paused = False
    server.note_change()
    return server.info()


@router.post("/weights/updates", status_code=202, responses=_UPDATE_PROBLEMS, tags=["weights"])
async def begin_update(body: BeginUpdate, request: Request) -> UpdateStatus:
    """Start pulling a version; the one that is served stays until the commit."""
    server, serving = _server(request), _serving(request, needs_weights=False)
    peers = [
        *(await live_replicas(server.redis, "trainer")),
        *(await live_replicas(server.redis, "rollout")),
    ]
    return serving.updates.begin(body, known_sources=server.known_sources(peers))


@router.get("/weights/updates/{version}", responses=_UPDATE_PROBLEMS, tags=["weights"])
async def update_status(version: Version, request: Request) -> UpdateStatus:
    """How far the update is."""
    return _serving(request, needs_weights=False).updates.status(version)


@router.post(
    "/weights/updates/{version}/commit",
    responses=_UPDATE_PROBLEMS
    | failures(
        {412: "not the effective checksum expected", 500: "refused; the previous version serves"}
    ),
    tags=["weights"],
)
async def commit_update(version: Version, body: CommitUpdate, request: Request) -> CommitResult:
    """Activate a staged version, or serve on as before."""
    return await _serving(request, needs_weights=False).updates.commit(version, body)


@router.post(
    "/weights/updates/{version}/rehearse",
    responses=_UPDATE_PROBLEMS | _EMBEDDED_ONLY | failures({500: "a commit would be refused"}),
    tags=["weights"],
)
async def rehearse_update(version: Version, body: CommitUpdate, request: Request) -> CommitResult:
    """Load, restore and probe the active version once more, beside what serves."""
    return await _embedded(request).updates.rehearse(version, body)


@router.delete("/weights/updates/{version}", responses=_UPDATE_PROBLEMS, tags=["weights"])
async def abort_update(version: Version, request: Request) -> UpdateStatus:
    """Give up a staged version; the one that is served stays."""
    return await _serving(request, needs_weights=False).updates.abort(version)


async def answer_error(_: Request, err: Exception) -> JSONResponse:
    """One status per kind of error, its text as the detail."""
    for kind, status in STATUS.items():
        if isinstance(err, kind):
            return JSONResponse({"detail": str(err) or "the deadline passed"}, status_code=status)
    raise err


STATUS: dict[type[Exception], int] = {
    UpdateUnknown: 404,
    UpdateConflict: 409,
    NotAsExpected: 412,
    CommitFailed: 500,
    Retryable: 409,
    Rejected: 422,
    ChannelClosed: 503,
    DeadlineExceeded: 504,
    TimeoutError: 504,
    ValueError: 422,
}


def _server(request: Request) -> RolloutServer:
    return cast(RolloutServer, request.app.state.server)


def _serving(request: Request, *, needs_weights: bool = True) -> Serving:
    server = _server(request)
    if server.serving is None:
        raise HTTPException(503, f"no engine: {server.unready() or 'no job is active'}")
    if needs_weights and server.serving.policy_version is None:
        raise HTTPException(503, "waiting for weights")
    return server.serving


def _embedded(request: Request) -> Serving:
    """What only the embedded engine can do; 501 for another."""
    serving = _serving(request)
    engine = serving.job.rollout.engine
    if engine != "embedded":
        raise HTTPException(501, f"engine {engine} exposes log-probabilities only")
    return serving


def _check_generate(body: GenerateRequest, server: RolloutServer) -> None:
    limits = server.config.limits
    _check_count("prompts", len(body.prompts), limits.max_prompts)
    _check_count("samples", len(body.prompts) * body.num_samples, limits.max_samples)
    if body.timeout_s > limits.max_timeout_s:
        raise ValueError(f"timeout_s {body.timeout_s:g} exceeds {limits.max_timeout_s:g}")


def _check_count(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise ValueError(f"{number} {what} exceed {limit}")


def _group_request(body: GenerateRequest, index: int, serving: Serving) -> GroupRequest:
    prompt, sampling = body.prompts[index], body.sampling
    ids = prompt.token_ids if prompt.text is None else serving.tokenizer.encode(prompt.text)
    if "stop_token_ids" not in sampling.model_fields_set:
        stops = list(serving.tokenizer.stop_token_ids)
        sampling = sampling.model_copy(update={"stop_token_ids": stops})
    vocabulary = serving.engine.spec.arch.vocab_size
    for token_id in (*(ids or ()), *sampling.stop_token_ids):
        if not 0 <= token_id < vocabulary:
            text = f"token id {token_id} is outside the vocabulary of {vocabulary}"
            raise ValueError(f"prompt {index}: {text}")
    return GroupRequest(
        request_id="",
        prompt_token_ids=np.array(ids, np.int32),
        samples=list(range(body.num_samples)),
        sampling=sampling,
        seed=body.seed,
        prompt_index=index,
        policy_version=body.policy_version,
    )


def _sample(completion: Completion, serving: Serving) -> Sample:
    return Sample(
        token_ids=completion.token_ids.tolist(),
        logprobs=completion.logprobs.tolist(),
        text=text_of(completion, serving.tokenizer),
        finish_reason=completion.finish_reason,
        version_spans=[
            VersionSpan(policy_version=version, num_tokens=num)
            for version, num in completion.version_spans
        ],
    )


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group of them, groups opened."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first
