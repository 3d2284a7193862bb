"""Parity over HTTP: ask for a run, look at it, read its report as JSON or as a page."""

import asyncio
from typing import Annotated, cast

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from services.evaluator.parity.report import ParityStatus
from services.evaluator.parity.requests import ParityRequest, ParityRuns
from shared.answers import MALFORMED, NO_BROKER, failures
from shared.rest_parameters import MAX_ID_CHARS

UNKNOWN = failures({404: "no such run is remembered"})
REFUSED = failures({409: "no job or server to compare", 422: MALFORMED, 503: NO_BROKER})
ParityId = Annotated[str, Path(max_length=MAX_ID_CHARS, description="as the request was answered")]

router = APIRouter(prefix="/v1/parity", tags=["parity"])


class ParityList(BaseModel):
    """Comparisons that somebody asked for."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    parity: list[ParityStatus]
    """Oldest first."""


@router.post("", status_code=202, responses=REFUSED)
async def submit(body: ParityRequest, request: Request) -> ParityStatus:
    """Score the same tokens with sampler and trainer, and compare."""
    return await _runs(request).submit(body)


@router.get("")
async def list_runs(request: Request) -> ParityList:
    """Those that are remembered, at most a hundred."""
    return ParityList(parity=_runs(request).all())


@router.get("/{parity_id}", responses=UNKNOWN)
async def get_run(parity_id: ParityId, request: Request) -> ParityStatus:
    """How far it is, and its report once it has finished."""
    return _run(parity_id, request)


@router.get(
    "/{parity_id}/report",
    response_class=HTMLResponse,
    responses=UNKNOWN | failures({409: "the run has no report, or none yet"}),
)
async def page(parity_id: ParityId, request: Request) -> HTMLResponse:
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
