"""Jobs over HTTP: submit, look, pause, resume, cancel, follow; and scoring by the policy."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from services.trainer.config import PROJECT_ROOT, TrainerConfig
from services.trainer.events import EVENTS_FILE
from services.trainer.jobs.changes import Changes, changed
from services.trainer.jobs.reports import REPORT_FILE
from services.trainer.jobs.runner import JobRunner
from services.trainer.jobs.status import job_status
from services.trainer.jobs.store import STOPPED, JobStore, KeyReused, StoredJob, WrongState
from services.trainer.jobs.submission import (
    DescribedAs,
    Problem,
    Refused,
    allowed_roots,
    check_abilities,
    check_files,
    read_document,
)
from services.trainer.keeper import StepRefused
from services.trainer.ranks import RanksLost
from services.trainer.report.overview import Overviews
from services.trainer.sse import event_stream
from shared.answers import MALFORMED, NO_BROKER, EscapedJSONResponse, failures
from shared.job import Job
from shared.job_answers import JobList, JobStatus, RunOverview, ServerList, Submitted
from shared.registry import Replica, live_replicas
from shared.rest_parameters import MAX_NUMBER, JobId

MAX_DOCUMENT_BYTES = 2**20
MAX_SCORE_BYTES = 64 * 2**20
MAX_SCORE_SEQUENCES = 1024
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
SUMMARY_FILE = "summary.json"
TEXT = {"schema": {"type": "string"}}
SUMMARY = {
    "type": "object",
    "description": "a free map: which numbers and texts there are depends on what the job did",
    "additionalProperties": True,
}
NO_JOB = "there is no such job"
NO_EVENTS = "there is no such job, or it has not begun"
FULL = "the disk is full; file and free space are named"
NOT_FOUND = failures({404: NO_JOB})
CONFLICT = failures({404: NO_JOB, 409: "the job's state does not allow it", 507: FULL})

router = APIRouter(prefix="/v1", tags=["jobs"])


class ScoreRequest(BaseModel):
    """Example: {"sequences": [[5, 17, 3]]}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sequences: list[list[TokenId]] = Field(max_length=MAX_SCORE_SEQUENCES)
    """Token ids; tokens 1 to T-1 of each are scored."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Log-probabilities are at this temperature."""
    policy_version: int | None = Field(None, ge=0, le=MAX_NUMBER)
    """The version that has to be held, or the answer is 409; null: whichever is held."""
    timeout_s: float = Field(120.0, gt=0, le=3600)
    """Seconds to wait for the ranks."""


class Scores(BaseModel):
    """`logprobs[i][t]` is of token t + 1 of sequence i."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    policy_version: int
    """The version that scored."""
    logprobs: list[list[float]]
    """Natural logarithms, T-1 for each sequence of T tokens."""


class _State:
    """What handlers need, from the app's state."""

    def __init__(self, request: Request) -> None:
        state = request.app.state
        self.store: JobStore = state.store
        self.runner: JobRunner = state.runner
        self.config: TrainerConfig = state.config
        self.redis: Any = state.redis
        self.overviews: Overviews = state.overviews

    def job(self, job_id: str) -> StoredJob:
        try:
            return self.store.get(job_id)
        except LookupError as err:
            raise HTTPException(404, str(err)) from err

    async def status(self, job: StoredJob) -> JobStatus:
        run_dir = self.runner.run_dir(job.job_id)
        doing, warnings = self.runner.doing(job.job_id), self.runner.warnings(job.job_id)
        found = await asyncio.to_thread(job_status, job, run_dir, doing=doing, warnings=warnings)
        return JobStatus.model_validate(found)


State = Annotated[_State, Depends()]
IdempotencyKey = Annotated[
    str | None, Header(max_length=200, description="the same key is the same job, however often")
]


def at_most(max_bytes: int) -> Any:
    """Refuse a request whose body says that it is larger."""

    def check(request: Request) -> None:
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > max_bytes:
            raise HTTPException(413, f"{length} bytes exceed {max_bytes}")

    return Depends(check)


@router.post(
    "/jobs",
    status_code=201,
    dependencies=[at_most(MAX_DOCUMENT_BYTES)],
    responses={
        200: {"model": Submitted, "description": "the same key submitted it before"},
        **failures(
            {409: "the idempotency key belongs to another document", 422: MALFORMED, 507: FULL}
        ),
    },
)
async def submit(
    state: State,
    response: Response,
    document: Annotated[dict[str, Any], DescribedAs(Job), Body()],
    idempotency_key: IdempotencyKey = None,
) -> Submitted:
    """Queue a job. Its files are checked before the answer, unless its key has queued it before."""
    asked = read_document(document)
    try:
        if known := state.store.known(asked, idempotency_key=idempotency_key):
            response.status_code = 200
            return Submitted(job_id=known.job_id, warnings=known.job.warnings)
        roots = allowed_roots(PROJECT_ROOT, [*state.config.data_roots, state.config.runs_dir])
        job = await asyncio.to_thread(check_files, check_abilities(asked), roots)
        stored, is_new = state.store.add(job, asked=asked, idempotency_key=idempotency_key)
    except KeyReused as err:
        raise HTTPException(409, str(err)) from err
    response.status_code = 201 if is_new else 200
    state.runner.look()
    return Submitted(job_id=stored.job_id, warnings=stored.job.warnings)


@router.get("/jobs")
async def list_jobs(state: State) -> JobList:
    """Every job, newest last."""
    return JobList(jobs=[await state.status(job) for job in state.store.all()])


@router.get("/jobs/{job_id}", responses=NOT_FOUND)
async def show_job(state: State, job_id: JobId) -> JobStatus:
    """Where it is, and what its newest step was like."""
    return await state.status(state.job(job_id))


@router.post("/jobs/{job_id}/cancel", responses=CONFLICT)
async def cancel(state: State, job_id: JobId) -> JobStatus:
    """End it for good; what it has trained stays, and its report is written."""
    return await _asked(state, job_id, "cancel")


@router.post("/jobs/{job_id}/pause", responses=CONFLICT)
async def pause(state: State, job_id: JobId) -> JobStatus:
    """The step in progress is finished first; ranks that start, load or replay are stopped."""
    return await _asked(state, job_id, "pause")


@router.post(
    "/jobs/{job_id}/resume",
    dependencies=[at_most(MAX_DOCUMENT_BYTES)],
    responses=CONFLICT | failures({422: "what is to change cannot be, or does not fit"}),
)
async def resume(
    state: State,
    job_id: JobId,
    changes: Annotated[dict[str, Any] | None, DescribedAs(Changes), Body()] = None,
) -> JobStatus:
    """Continue where the job stopped. `changes`, parts of a job's document, spread it otherwise:
    `cluster`, `actor.parallel`, `.recompute`, `.optimizer.offload`, `.max_tokens_per_gpu`, `.env`
    and `.watchdog`."""
    if not changes:
        return await _asked(state, job_id, "resume")
    roots = allowed_roots(PROJECT_ROOT, [*state.config.data_roots, state.config.runs_dir])
    job = check_abilities(changed(state.job(job_id).job, changes))
    job = await asyncio.to_thread(check_files, job, roots)
    return await _asked(state, job_id, "resume", job)


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"description": "an event of the run each", "content": {"text/event-stream": TEXT}},
        **NOT_FOUND,
    },
)
async def follow(
    state: State,
    request: Request,
    job_id: JobId,
    after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="lines that the reader has")] = 0,
    last_event_id: Annotated[
        int | None,
        Header(ge=0, le=MAX_NUMBER, description="the same, as browsers say it when they come back"),
    ] = None,
) -> StreamingResponse:
    """Server-sent events: the lines of the run's events.jsonl from line `after` on, then new ones.

    `id` is the line's number; a reconnecting browser names the last one it has.
    """
    state.job(job_id)

    def ended() -> str | None:
        now = state.store.get(job_id).state
        return now if now in STOPPED else None

    def leaving() -> bool:
        return bool(getattr(request.app.state, "draining", False))

    path = state.runner.run_dir(job_id) / EVENTS_FILE
    begin = after if last_event_id is None else last_event_id
    lines: AsyncIterator[str] = event_stream(path, after=begin, ended=ended, leaving=leaving)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines, media_type="text/event-stream", headers=headers)


@router.get("/jobs/{job_id}/metrics", response_model=RunOverview, responses=NOT_FOUND)
async def metrics(state: State, job_id: JobId) -> Response:
    """The run for a screen: at most 1,000 steps (means over several in a longer run), evaluations,
    the last updates and events, and counts of all events; `after` is where the stream goes on.
    """
    state.job(job_id)
    path = state.runner.run_dir(job_id) / EVENTS_FILE
    # Not checked once more: the events were when they were written, and there may be thousands.
    body = await asyncio.to_thread(lambda: to_json(state.overviews.document(path)))
    return Response(body, media_type="application/json")


@router.get(
    "/jobs/{job_id}/report",
    response_class=FileResponse,
    responses={
        200: {"description": "one HTML file", "content": {"text/html": TEXT}},
        **failures({404: NO_EVENTS}),
    },
)
async def report(state: State, job_id: JobId) -> FileResponse:
    """The run as a page. Of a job in progress as it is now, made anew at most twice a minute."""
    return await _reported(state, job_id, REPORT_FILE, "text/html")


@router.get(
    "/jobs/{job_id}/summary",
    response_class=FileResponse,
    responses={
        200: {"description": "summary.json", "content": {"application/json": {"schema": SUMMARY}}},
        **failures({404: NO_EVENTS}),
    },
)
async def summary(state: State, job_id: JobId) -> FileResponse:
    """The report's numbers, as new as the report; `state` says whether the job has ended."""
    return await _reported(state, job_id, SUMMARY_FILE, "application/json")


@router.get("/servers", responses=failures({503: NO_BROKER}))
async def servers(state: State) -> ServerList:
    """Live replicas of all services."""
    found: list[Replica] = []
    for service in ("trainer", "rollout", "reward", "evaluator"):
        found += await live_replicas(state.redis, service)
    return ServerList(servers=found)


@router.post(
    "/score",
    dependencies=[at_most(MAX_SCORE_BYTES)],
    responses=failures(
        {
            409: "no job is active, or it holds another version",
            503: "the ranks cannot be kept alive, or the job is ending",
            504: "the ranks were busy for all of `timeout_s`",
        }
    ),
)
async def score(state: State, asked: ScoreRequest) -> Scores:
    """Log-probabilities of tokens 1..T-1 of each sequence under the trained policy as it is now."""
    conductor = state.runner.active
    if conductor is None:
        raise HTTPException(409, "no job is active")
    try:
        async with asyncio.timeout(asked.timeout_s):
            version, logprobs = await conductor.policy.score(
                asked.sequences, temperature=asked.temperature, policy_version=asked.policy_version
            )
    except LookupError as err:
        raise HTTPException(409, str(err)) from err
    except ValueError as err:
        raise HTTPException(422, [Problem("sequences", None, str(err)).document()]) from err
    except (RanksLost, StepRefused) as err:
        raise HTTPException(503, str(err)) from err
    except TimeoutError as err:
        raise HTTPException(504, f"the ranks were busy for {asked.timeout_s:g} s") from err
    return Scores(policy_version=version, logprobs=logprobs)


async def _asked(state: _State, job_id: str, what: str, job_then: Job | None = None) -> JobStatus:
    before = state.job(job_id).state
    try:
        if what == "resume":
            job = state.store.resume(job_id, job_then)
        else:
            job = state.store.ask(job_id, "pause" if what == "pause" else "cancel")
    except WrongState as err:
        raise HTTPException(409, str(err)) from err
    if before in ("queued", "paused") and job.state == "cancelled":
        await state.runner.tell_cancelled(job_id)
    state.runner.look()
    return await state.status(job)


async def _reported(state: _State, job_id: str, name: str, media_type: str) -> FileResponse:
    """A file that comes with the report, which is made anew if it has aged."""
    is_running = state.job(job_id).state == "running"
    run_dir = state.runner.run_dir(job_id)
    await state.runner.reports.refresh(run_dir, is_running=is_running)
    path = run_dir / name
    if not path.is_file():
        raise HTTPException(404, f"there is no {name} of {job_id} yet")
    return FileResponse(path, media_type=media_type)


async def answer_refused(_: Request, err: Exception) -> JSONResponse:
    """422 with one entry per problem."""
    assert isinstance(err, Refused)
    detail = [one.document() for one in err.problems]
    return EscapedJSONResponse({"detail": detail}, status_code=422)


async def answer_unwritable(_: Request, err: Exception) -> JSONResponse:
    """507: the disk is full; the detail names file and free space."""
    return EscapedJSONResponse({"detail": str(err)}, status_code=507)
