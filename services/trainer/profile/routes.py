"""Profiles over HTTP: ask for one, see how far it is, take its trace."""

import json
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
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

NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"description": "there is no such profile"}}
router = APIRouter(prefix="/v1/jobs/{job_id}/profiles", tags=["operating"])


class ProfileRequest(BaseModel):
    """POST …/profiles."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    steps: int = Field(3, ge=1, le=50)
    """Steps to profile; one more is recorded before them."""


class ProfileStatus(BaseModel):
    """Example: state 'recording', 1 of 3 steps seen."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    profile_id: str
    """Its name, and that of its folder in the run's `profiles/`."""
    state: str
    """`asked`, `recording`, `done` or `failed`."""
    steps: int
    """Steps asked for."""
    steps_seen: int
    """Steps seen so far; fewer than asked for when the job ended first."""
    error: str
    """Why it failed."""
    result: dict[str, Any]
    """Once it is done: sentences, and the shares of each process."""


@router.post("", status_code=202, responses={409: {"description": "not possible now"}})
async def ask(request: Request, job_id: str, asked: ProfileRequest) -> ProfileStatus:
    """Have every process of the running job record what it does for a few steps."""
    conductor = request.app.state.runner.active
    if not isinstance(conductor, Conductor) or conductor.parts.job_id != job_id:
        raise HTTPException(409, f"{job_id} is not in progress, or has no services to profile")
    try:
        return _status(conductor.parts.profiler.ask(asked.steps))
    except ProfileRefused as err:
        raise HTTPException(409, str(err)) from err


@router.get("/{profile_id}", responses=NOT_FOUND)
async def show(request: Request, job_id: str, profile_id: str) -> ProfileStatus:
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
        result=result,
    )


@router.get("/{profile_id}/trace", responses=NOT_FOUND, response_class=FileResponse)
async def trace(request: Request, job_id: str, profile_id: str) -> FileResponse:
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
        result=profile.result,
    )
