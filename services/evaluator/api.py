"""Evaluations on request: ask, look, read the result."""

from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from services.evaluator.asked import EvalRequest, EvalStatus
from services.evaluator.requests import Refused, RequestedEvals

router = APIRouter(prefix="/v1/evals", tags=["evals"])


@router.post("", status_code=202, responses={409: {"description": "no server has a policy"}})
async def submit(body: EvalRequest, request: Request) -> EvalStatus:
    """Evaluate the version that a server serves now, or a checkpoint."""
    return await _evals(request).submit(body)


@router.get("")
async def list_evals(request: Request) -> dict[str, list[EvalStatus]]:
    return {"evals": _evals(request).all()}


@router.get("/{eval_id}", response_model=EvalStatus, responses={404: {"description": "unknown"}})
async def get_eval(eval_id: str, request: Request) -> Any:
    status = _evals(request).get(eval_id)
    if status is None:
        return JSONResponse({"detail": f"no evaluation {eval_id} is remembered"}, status_code=404)
    return status


async def answer_refused(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, Refused)
    detail = [{"key": err.key, "message": err.message}]
    return JSONResponse({"detail": detail}, status_code=err.status)


def _evals(request: Request) -> RequestedEvals:
    return cast(RequestedEvals, request.app.state.requested)
