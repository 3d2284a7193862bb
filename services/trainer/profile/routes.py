"""Profiles over HTTP: ask for one, see how far it is, take its trace."""

import json
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from services.trainer.conductor import Conductor
from services.trainer.profile.session import (
    PROFILES,
    TRACE_FILE,
    WAITS_FILE,
    Profile,
    ProfileRefused,
)
from shared.answers import failures
from shared.job_answers import ProfileResult, ProfileStatus
from shared.rest_parameters import MAX_ID_CHARS, JobId

NOT_FOUND = failures({404: "there is no such job or profile"})
IMPOSSIBLE = failures({409: "the job is not in progress, or a profile is being taken"})
ProfileId = Annotated[
    str, PathParameter(max_length=MAX_ID_CHARS, description="as the request was answered")
]
TRACE = {
    "type": "object",
    "description": "a free map, in Chrome's trace event format",
    "additionalProperties": True,
}

router = APIRouter(prefix="/v1/jobs/{job_id}/profiles", tags=["operating"])


class ProfileRequest(BaseModel):
    """Example: {"steps": 3}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    steps: int = Field(3, ge=1, le=50)
    """Steps to profile; the recording begins one step earlier."""


@router.post("", status_code=202, responses=IMPOSSIBLE)
async def ask(request: Request, job_id: JobId, asked: ProfileRequest) -> ProfileStatus:
    """Have every process of the running job record what it does for a few steps."""
    conductor = request.app.state.runner.active
    if not isinstance(conductor, Conductor) or conductor.parts.job_id != job_id:
        raise HTTPException(409, f"{job_id} is not in progress, or has no services to profile")
    try:
        return _status(conductor.parts.profiler.ask(asked.steps))
    except ProfileRefused as err:
        raise HTTPException(409, str(err)) from err


@router.get("/{profile_id}", responses=NOT_FOUND)
async def show(request: Request, job_id: JobId, profile_id: ProfileId) -> ProfileStatus:
    """How far it is, and what it shows."""
    conductor = request.app.state.runner.active
    profiler = conductor.parts.profiler if conductor is not None else None
    found = profiler.current if profiler and conductor.parts.job_id == job_id else None
    if found is not None and found.profile_id == profile_id:
        return _status(found)
    folder = _folder(request, job_id, profile_id)
    result = json.loads((folder / WAITS_FILE).read_text())
    return ProfileStatus(
        profile_id=profile_id,
        state="done",
        steps=result["steps"],
        steps_seen=result["steps"],
        error="",
        result=ProfileResult.model_validate(result),
    )


@router.get(
    "/{profile_id}/trace",
    response_class=FileResponse,
    responses={
        200: {"description": "a Chrome trace", "content": {"application/json": {"schema": TRACE}}},
        **NOT_FOUND,
    },
)
async def trace(request: Request, job_id: JobId, profile_id: ProfileId) -> FileResponse:
    """The time line, for https://ui.perfetto.dev or chrome://tracing."""
    path = _folder(request, job_id, profile_id) / TRACE_FILE
    return FileResponse(path, media_type="application/json")


def _folder(request: Request, job_id: str, profile_id: str) -> Path:
    try:
        request.app.state.store.get(job_id)
    except LookupError as err:
        raise HTTPException(404, str(err)) from err
    folder = request.app.state.runner.run_dir(job_id) / PROFILES / profile_id
    if not profile_id.isalnum() or not (folder / WAITS_FILE).is_file():
        raise HTTPException(404, f"{job_id} has no finished profile {profile_id}")
    return Path(folder)


def _status(profile: Profile) -> ProfileStatus:
    return ProfileStatus(
        profile_id=profile.profile_id,
        state=profile.state,
        steps=profile.steps,
        steps_seen=profile.steps_seen,
        error=profile.error,
        result=ProfileResult.model_validate(profile.result) if profile.result else None,
    )
