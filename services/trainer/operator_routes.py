"""What the dashboard shows beside curves: samples, dead letters, and jobs to start from."""

import asyncio
import tomllib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from services.trainer.announcements import work_streams
from services.trainer.config import PROJECT_ROOT
from services.trainer.shown_samples import SampleHead, SampleShelf, ShownSample
from shared import topology
from shared.answers import NO_BROKER, failures
from shared.dead_letters import DeadLetter, dead_letters, requeue_dead
from shared.rest_parameters import MAX_ID_CHARS, MAX_NUMBER, JobId

EXCERPT_CHARS = 200
NOT_FOUND = failures({404: "there is no such job"})
NO_SAMPLE = failures({404: "there is no such job, or the sample is not kept"})
ON_BROKER = NOT_FOUND | failures({503: NO_BROKER})
RolloutId = Annotated[
    str, Path(max_length=2 * MAX_ID_CHARS, description="the sample's name, as the list has it")
]
DeadId = Annotated[str, Field(max_length=MAX_ID_CHARS)]
Stage = Literal["prompts", "rollouts", "groups", "evals"]

router = APIRouter(prefix="/v1", tags=["operating"])


class SampleList(BaseModel):
    """A window on the newest steps, not a record of all."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    samples: list[SampleHead]
    """Newest step first; within a step those furthest from the trainer first."""


class Letter(BaseModel):
    """A message that could never be handled."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    dead_id: str
    """Its name in the list of dead letters."""
    stage: Stage
    """The stream that it was taken from."""
    reason: str
    """Why nobody could handle it."""
    consumer: str
    """The replica that buried it."""
    times_delivered: int
    """How often it was tried."""
    buried_at_s: float
    """Unix time in seconds."""
    body_bytes: int
    """Length of the message in bytes."""
    is_whole: bool
    """Whether the message is all there: an excerpt cannot be queued again."""
    excerpt: str
    """Its first 200 bytes as text; what is no text is escaped."""


class LetterList(BaseModel):
    """The job's dead letters."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    letters: list[Letter]
    """Oldest first, at most a hundred of each stage."""


class RequeueRequest(BaseModel):
    """POST …/dead-letters/requeue."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    stage: Stage
    """The stream that they were taken from."""
    dead_ids: list[DeadId] = Field(min_length=1, max_length=1000)
    """Which letters, by their names."""


class Requeued(BaseModel):
    """Example: {"num_requeued": 2}; one that is gone or no excerpt of it is kept is not counted."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    num_requeued: int
    """Messages that are in their stream again."""


class Preset(BaseModel):
    """A job to start from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """Name of its file in `configs/`, without `.toml`."""
    document: dict[str, Any]
    """The job as it would be submitted; a free map here, checked as a job by its submission."""


class PresetList(BaseModel):
    """Jobs to start from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    presets: list[Preset]
    """By name."""


@router.get("/jobs/{job_id}/samples", responses=NOT_FOUND)
async def samples(
    request: Request,
    job_id: JobId,
    step: Annotated[
        int | None,
        Query(ge=0, le=MAX_NUMBER, description="of this step only; default: of all kept"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="at most so many")] = 200,
) -> SampleList:
    """Samples of the newest steps: a group of each, and those furthest from the trainer."""
    run_dir = _run_dir(request, job_id)

    def read() -> list[dict[str, Any]]:
        shelf = SampleShelf.of_run(run_dir)
        if shelf is None:
            return []
        try:
            return shelf.heads(step=step, limit=limit)
        finally:
            shelf.close()

    return SampleList.model_validate({"samples": await asyncio.to_thread(read)})


@router.get("/jobs/{job_id}/samples/{rollout_id}", responses=NO_SAMPLE)
async def sample(request: Request, job_id: JobId, rollout_id: RolloutId) -> ShownSample:
    """One sample, token by token."""
    run_dir = _run_dir(request, job_id)

    def read() -> ShownSample | None:
        shelf = SampleShelf.of_run(run_dir)
        if shelf is None:
            return None
        try:
            return shelf.get(rollout_id)
        finally:
            shelf.close()

    found = await asyncio.to_thread(read)
    if found is None:
        raise HTTPException(404, f"{rollout_id} is not among the samples kept of {job_id}")
    return found


@router.get("/jobs/{job_id}/dead-letters", responses=ON_BROKER)
async def letters(request: Request, job_id: JobId) -> LetterList:
    """Messages of the job that nobody could handle, with the reason."""
    _run_dir(request, job_id)
    redis = request.app.state.redis
    found = [
        _letter(stage, letter)
        for stage, stream in _streams(job_id).items()
        for letter in await dead_letters(redis, stream)
    ]
    return LetterList(letters=sorted(found, key=lambda one: one.buried_at_s))


@router.post("/jobs/{job_id}/dead-letters/requeue", responses=ON_BROKER)
async def requeue(request: Request, job_id: JobId, asked: RequeueRequest) -> Requeued:
    """Put letters back into their stream as new messages.

    A group whose message was buried has been dropped from the books and replaced meanwhile: it is
    handled, its rewards count in the raw curve, and it is not trained. So this shows whether the
    cause is gone, loses no reward, and saves an evaluation.
    """
    _run_dir(request, job_id)
    stream = _streams(job_id)[asked.stage]
    ids = [dead_id.encode() for dead_id in asked.dead_ids]
    return Requeued(num_requeued=await requeue_dead(request.app.state.redis, stream, ids))


@router.get("/presets")
async def presets() -> PresetList:
    """Jobs to start from."""
    return await asyncio.to_thread(_presets)


def _presets() -> PresetList:
    found = [
        Preset(name=path.stem, document=tomllib.loads(path.read_text()))
        for path in sorted((PROJECT_ROOT / "configs").glob("*.toml"))
    ]
    return PresetList(presets=[one for one in found if "steps" in one.document])


def _run_dir(request: Request, job_id: str) -> Any:
    state = request.app.state
    try:
        state.store.get(job_id)
    except LookupError as err:
        raise HTTPException(404, str(err)) from err
    return state.runner.run_dir(job_id)


def _streams(job_id: str) -> dict[Any, str]:
    stages = {stage: stream for stage, (stream, _) in work_streams(job_id).items()}
    return {**stages, "evals": topology.evals(job_id)}


def _letter(stage: Stage, letter: DeadLetter) -> Letter:
    return Letter(
        dead_id=letter.dead_id.decode(),
        stage=stage,
        reason=letter.reason,
        consumer=letter.consumer,
        times_delivered=letter.times_delivered,
        buried_at_s=letter.buried_at_s,
        body_bytes=letter.body_bytes,
        is_whole=len(letter.body) == letter.body_bytes,
        excerpt=letter.body[:EXCERPT_CHARS].decode("utf-8", "backslashreplace"),
    )
