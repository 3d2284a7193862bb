"""Versions of the job in progress: what is kept, manifests, where shards are, the way back."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as FromPath
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from services.trainer.conductor import Conductor
from services.trainer.jobs.runner import JobRunner
from services.trainer.replayer import Replayer
from services.trainer.versions import VersionStore
from shared.answers import failures
from shared.errors import WeightsCorrupt
from shared.job_answers import KeptVersion, KeptVersions
from shared.rest_parameters import MAX_NUMBER, JobId, Version
from shared.weights.manifest import Manifest
from shared.weights.shard_server import Kind

NOT_OFFERED = failures({404: "no job is active, or this is not of a version that it offers"})
ShardKind = Annotated[Kind, FromPath(description="`shards`: whole; `deltas`: what changed in it")]
Index = Annotated[int, FromPath(ge=0, le=MAX_NUMBER, description="which, as the manifest counts")]

router = APIRouter(prefix="/v1", tags=["weights"])


class RollBack(BaseModel):
    """The current version ends a rollback. Example: {"to": 17}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    to: int = Field(ge=0, le=MAX_NUMBER)
    """The version to serve; the current one ends a rollback."""


@router.get("/jobs/{job_id}/weights", responses=failures({404: "no such job in progress"}))
async def kept_versions(request: Request, job_id: JobId) -> KeptVersions:
    """Every version that can be served again, oldest first."""
    parts = _active(request, job_id).parts
    kept = await asyncio.to_thread(parts.store.describe)
    versions = [
        KeptVersion(**asdict(one), servers=parts.publisher.serving(one.policy_version))
        for one in kept
    ]
    publisher = parts.publisher
    return KeptVersions(
        current=publisher.current, rolled_back_to=publisher.rolled_back_to, versions=versions
    )


@router.post(
    "/jobs/{job_id}/weights/rollback",
    status_code=202,
    responses=failures(
        {
            404: "no such job in progress, or the version is not kept",
            409: "a file that the version is rebuilt from is missing",
        }
    ),
)
async def roll_back(request: Request, job_id: JobId, body: RollBack) -> KeptVersions:
    """Have every free server serve an older version under its own number; training waits."""
    try:
        await _active(request, job_id).parts.rollback.to(body.to)
    except LookupError as err:
        raise HTTPException(404, str(err)) from err
    except WeightsCorrupt as err:
        raise HTTPException(409, str(err)) from err
    return await kept_versions(request, job_id)


@router.get("/weights/{version}/manifest", responses=NOT_OFFERED)
async def manifest(request: Request, version: Version) -> Manifest:
    """What the version consists of: tensors, shards and checksums."""
    found = _store(request).manifest(version)
    if found is None:
        raise HTTPException(404, f"version {version} is not offered")
    return found


@router.get(
    "/weights/{version}/{kind}/{index}",
    status_code=307,
    response_class=RedirectResponse,
    responses=NOT_OFFERED,
)
async def shard(
    request: Request, version: Version, kind: ShardKind, index: Index
) -> RedirectResponse:
    """Where the bytes are: a shard or what changed in it, also in ranges from an offset."""
    if _store(request).file(version, kind, index) is None:
        raise HTTPException(404, f"{kind} {index} of version {version} is not offered")
    config, port = request.app.state.config, request.app.state.shards.port
    return RedirectResponse(f"{config.url_at(port)}/v1/weights/{version}/{kind}/{index}")


def find_shard(runner: JobRunner, version: int, kind: Kind, index: int) -> Path | None:
    """The file of the job in progress; called in threads."""
    active = runner.active
    return None if active is None else active.parts.store.file(version, kind, index)


def _active(request: Request, job_id: str) -> Conductor | Replayer:
    runner: JobRunner = request.app.state.runner
    if runner.active is None or runner.active.parts.job_id != job_id:
        raise HTTPException(404, f"job {job_id} is not in progress")
    return runner.active


def _store(request: Request) -> VersionStore:
    active = request.app.state.runner.active
    if active is None:
        raise HTTPException(404, "no job is active")
    store: VersionStore = active.parts.store
    return store
