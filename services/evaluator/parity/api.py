"""Parity over HTTP: ask for a run, look at it, read its report as JSON or as a page."""

import asyncio
from typing import Any, cast

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse

from services.evaluator.parity.report import ParityStatus
from services.evaluator.parity.requests import ParityRequest, ParityRuns

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "no such run is remembered"}}

router = APIRouter(prefix="/v1/parity", tags=["parity"])


@router.post("", status_code=202, responses={409: {"description": "no job or server to compare"}})
async def submit(body: ParityRequest, request: Request) -> ParityStatus:
    """Score the same tokens with sampler and trainer, and compare."""
    return await _runs(request).submit(body)


@router.get("")
async def list_runs(request: Request) -> dict[str, list[ParityStatus]]:
    return {"parity": _runs(request).all()}


@router.get("/{parity_id}", responses=UNKNOWN)
async def get_run(parity_id: str, request: Request) -> ParityStatus:
    return _run(parity_id, request)


@router.get(
    "/{parity_id}/report",
    response_class=HTMLResponse,
    responses=UNKNOWN | {409: {"description": "the run has no report"}},
)
async def page(parity_id: str, request: Request) -> HTMLResponse:
    """The report as one HTML file with its plots."""
    found = _run(parity_id, request)
    if found.report is None:
        raise HTTPException(409, f"{parity_id} is {found.state}: {found.error or 'no report yet'}")
    # Plots need matplotlib, which takes half a second to import: only here.
    from services.evaluator.parity.page import render_page

    return HTMLResponse(await asyncio.to_thread(render_page, found.report))


def _run(parity_id: str, request: Request) -> ParityStatus:
    found = _runs(request).get(parity_id)
    if found is None:
        raise HTTPException(404, f"no parity run {parity_id} is remembered")
    return found


def _runs(request: Request) -> ParityRuns:
    return cast(ParityRuns, request.app.state.parity)
