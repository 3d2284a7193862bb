"""What can be seen of the trained policy while a job runs: inner states, and drift by source."""

import asyncio

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict

from services.trainer.conductor import Conductor
from services.trainer.drift import fields_of
from services.trainer.keeper import StepRefused
from services.trainer.ranks import RanksLost
from shared.answers import failures
from shared.bodies import limited_body
from shared.errors import Rejected, WeightsCorrupt
from shared.parity.trace import BINARY, MAX_BODY_BYTES, MEDIA_TYPE, TRACE_BODY, TraceRequest

NO_JOB_TO_ATTRIBUTE = (
    "no job is active: this asks the job that trains now; the report of one that has ended says it "
    "of the steps that were asked (attribution.every_steps)"
)

router = APIRouter(prefix="/v1", tags=["jobs"])


class Attributed(BaseModel):
    """`parts` by source add up to `whole`, the mean |Δ log p| of the step's samples."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    """The step whose samples were scored."""
    policy_version: int
    """The version held while they were."""
    num_tokens: int
    """Response tokens that were scored."""
    whole: float
    """Mean |Δ log p| of the step's response tokens."""
    parts: dict[str, float]
    """What each source adds to it, by the source's name."""
    explained_share: float
    """Share of `whole` that the parts add up to; 1 where all of it is explained."""


@router.post(
    "/attribution",
    responses=failures(
        {
            409: "no job is active, or it has trained nothing that can be scored",
            503: "the ranks cannot be kept alive, or the job is ending",
        }
    ),
)
async def attribution(request: Request) -> Attributed:
    """Where |Δ log p| of the last trained step comes from, under the weights held now."""
    conductor: Conductor | None = request.app.state.runner.active
    if conductor is None:
        raise HTTPException(409, NO_JOB_TO_ATTRIBUTE)
    try:
        step, version, found = await conductor.policy.attribute()
    except (LookupError, ValueError, WeightsCorrupt) as err:
        raise HTTPException(409, str(err)) from err
    except (RanksLost, StepRefused) as err:
        raise HTTPException(503, str(err)) from err
    return Attributed(step=step, policy_version=version, **fields_of(found))


@router.post(
    "/trace",
    response_class=Response,
    openapi_extra=TRACE_BODY,
    responses={
        200: {"description": "a msgpack `Traced`", "content": {MEDIA_TYPE: BINARY}},
        **failures(
            {
                409: "no job is active, or it holds another version",
                422: "the body is no request, or a value is out of bounds",
                503: "the ranks cannot be kept alive, or the job is ending",
                504: "the ranks were busy for all of `timeout_s`",
            }
        ),
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
            traced = await conductor.policy.trace(body, policy_version=asked.policy_version)
    except LookupError as err:
        raise HTTPException(409, str(err)) from err
    except ValueError as err:
        raise HTTPException(422, str(err)) from err
    except (RanksLost, StepRefused) as err:
        raise HTTPException(503, str(err)) from err
    except TimeoutError as err:
        raise HTTPException(504, f"the ranks were busy for {asked.timeout_s:g} s") from err
    return Response(traced, media_type=MEDIA_TYPE)
