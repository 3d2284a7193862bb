"""Versions of the job in progress, for servers to pull: manifests, and shards with ranges."""

from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse

from services.trainer.versions import VersionStore
from shared.weights.manifest import Manifest

router = APIRouter(prefix="/v1/weights", tags=["weights"])


@router.get("/{version}/manifest", responses={404: {"description": "not offered"}})
async def manifest(request: Request, version: int) -> Manifest:
    found = _store(request).manifest(version)
    if found is None:
        raise HTTPException(404, f"version {version} is not offered")
    return found


@router.get(
    "/{version}/shards/{index}",
    response_class=FileResponse,
    responses={404: {"description": "not offered"}, 206: {"description": "the range asked for"}},
)
async def shard(request: Request, version: int, index: int) -> FileResponse:
    path: Path | None = _store(request).shard(version, index)
    if path is None:
        raise HTTPException(404, f"shard {index} of version {version} is not offered")
    return FileResponse(path, media_type="application/octet-stream")


def _store(request: Request) -> VersionStore:
    active = request.app.state.runner.active
    if active is None:
        raise HTTPException(404, "no job is active")
    store: VersionStore = active.parts.store
    return store
