"""What can be seen of the trained policy over HTTP while a job runs: its inner states."""

import asyncio

from fastapi import APIRouter, HTTPException, Request, Response

from services.trainer.conductor import Conductor
from services.trainer.ranks import RanksLost
from shared.bodies import limited_body
from shared.errors import Rejected
from shared.parity.trace import MAX_BODY_BYTES, MEDIA_TYPE, TraceRequest

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.post(
    "/trace",
    response_class=Response,
    responses={
        409: {"description": "no job is active, or it holds another version"},
        413: {"description": "the body is too long"},
        422: {"description": "the body is no request, or a value is out of bounds"},
        503: {"description": "the ranks cannot be kept alive, or the job is ending"},
        504: {"description": "the ranks were busy for all of `timeout_s`"},
    },
)
async def trace(request: Request) -> Response:
    """Inner states after every sub-module: a msgpack `TraceRequest` in, a `Traced` out."""
    body = await limited_body(request, MAX_BODY_BYTES)
    try:
        asked = await asyncio.to_thread(TraceRequest.unpack, body)
    except Rejected as err:
        raise HTTPException(422, str(err)) from err
    conductor: Conductor | None = request.app.state.runner.active
    if conductor is None:
        raise HTTPException(409, "no job is active")
    try:
        async with asyncio.timeout(asked.timeout_s):
            traced = await conductor.trace(body, policy_version=asked.policy_version)
    except LookupError as err:
        raise HTTPException(409, str(err)) from err
    except ValueError as err:
        raise HTTPException(422, str(err)) from err
    except RanksLost as err:
        raise HTTPException(503, str(err)) from err
    except TimeoutError as err:
        raise HTTPException(504, f"the ranks were busy for {asked.timeout_s:g} s") from err
    return Response(traced, media_type=MEDIA_TYPE)
