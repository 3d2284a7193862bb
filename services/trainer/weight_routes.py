"""Versions of the job in progress: manifests, and where their shards are served."""

from pathlib import Path
from typing import Literal

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import RedirectResponse

from services.trainer.jobs.runner import JobRunner
from services.trainer.versions import VersionStore
from shared.weights.manifest import Manifest
from shared.weights.shard_server import Kind

router = APIRouter(prefix="/v1/weights", tags=["weights"])


@router.get("/{version}/manifest", responses={404: {"description": "not offered"}})
async def manifest(request: Request, version: int) -> Manifest:
    found = _store(request).manifest(version)
    if found is None:
        raise HTTPException(404, f"version {version} is not offered")
    return found


@router.get(
    "/{version}/{kind}/{index}",
    status_code=307,
    responses={404: {"description": "not offered"}},
)
async def shard(request: Request, version: int, kind: Kind, index: int) -> RedirectResponse:
    """Where the bytes are: a shard or what changed in it, also in ranges from an offset."""
    if _store(request).file(version, kind, index) is None:
        raise HTTPException(404, f"{kind} {index} of version {version} is not offered")
    config, port = request.app.state.config, request.app.state.shards.port
    return RedirectResponse(f"{config.url_at(port)}/v1/weights/{version}/{kind}/{index}")


def find_shard(
    runner: JobRunner, version: int, kind: Kind, index: int
) -> Path | Literal["coming"] | None:
    """The file of the job in progress; called in threads."""
    active = runner.active
    return None if active is None else active.parts.store.file(version, kind, index)


def _store(request: Request) -> VersionStore:
    active = request.app.state.runner.active
    if active is None:
        raise HTTPException(404, "no job is active")
    store: VersionStore = active.parts.store
    return store
