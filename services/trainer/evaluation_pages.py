"""The evaluator's pages, as seen through the trainer: people reach one address.

Only `GET /evals…` passes, to a live evaluator of the registry; its links are absolute paths, so
they lead back here.
"""

from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse

from shared.errors import HttpFailed
from shared.registry import live_replicas

PAGE_TIMEOUT_S = 60.0  # a comparison resamples ten thousand times

router = APIRouter(include_in_schema=False)


@router.get("/evals")
async def index(request: Request) -> HTMLResponse:
    return await _passed_on(request, "")


@router.get("/evals/{path:path}")
async def page(path: str, request: Request) -> HTMLResponse:
    return await _passed_on(request, f"/{quote(path)}")


async def _passed_on(request: Request, path: str) -> HTMLResponse:
    state = request.app.state
    found = await live_replicas(state.redis, "evaluator")
    if not found:
        raise HTTPException(503, "no evaluator is running, and its pages are there")
    try:
        content = await state.http.get(
            f"{found[0].url}/evals{path}",
            params=dict(request.query_params),
            timeout_s=PAGE_TIMEOUT_S,
        )
    except HttpFailed as err:
        if err.status is None:
            raise HTTPException(503, f"{found[0].name} does not answer") from err
        raise HTTPException(err.status, err.body) from err
    return HTMLResponse(content)
