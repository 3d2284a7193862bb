"""Evaluations on request: ask, look, read the result."""

from typing import Annotated, cast

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from services.evaluator.asked import EvalRequest, EvalStatus
from services.evaluator.requests import Refused, RequestedEvals
from shared.answers import MALFORMED, NO_BROKER, EscapedJSONResponse, failures
from shared.rest_parameters import MAX_ID_CHARS

UNKNOWN = failures({404: "no such evaluation is remembered"})
REFUSED = failures({409: "no server has a policy", 422: MALFORMED, 503: NO_BROKER})
EvalId = Annotated[
    str, Path(max_length=2 * MAX_ID_CHARS, description="as the request was answered")
]

router = APIRouter(prefix="/v1/evals", tags=["evals"])


class EvalList(BaseModel):
    """Evaluations that somebody asked for."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    evals: list[EvalStatus]
    """Oldest first."""


@router.post("", status_code=202, responses=REFUSED)
async def submit(body: EvalRequest, request: Request) -> EvalStatus:
    """Evaluate the version that a server serves now, or a checkpoint."""
    return await _evals(request).submit(body)


@router.get("")
async def list_evals(request: Request) -> EvalList:
    """Those that are remembered, at most a hundred."""
    return EvalList(evals=_evals(request).all())


@router.get("/{eval_id}", responses=UNKNOWN)
async def get_eval(eval_id: EvalId, request: Request) -> EvalStatus:
    """How far it is, and its result once it has finished."""
    status = _evals(request).get(eval_id)
    if status is None:
        raise HTTPException(404, f"no evaluation {eval_id} is remembered")
    return status


async def answer_refused(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, Refused)
    detail = [{"key": err.key, "value": None, "message": err.message}]
    return EscapedJSONResponse({"detail": detail}, status_code=err.status)


def _evals(request: Request) -> RequestedEvals:
    return cast(RequestedEvals, request.app.state.requested)
