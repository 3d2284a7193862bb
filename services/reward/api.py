"""`POST /v1/grade`: one check or thousands, within limits that a refusal names."""

from typing import Annotated, Any, cast

from fastapi import APIRouter, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.reward.config import LimitsConfig
from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from shared.messages import Outcome

MAX_ERRORS_SHOWN = 20

router = APIRouter(prefix="/v1", tags=["grading"])


def _text_of_number(value: Any) -> Any:
    """Golds are often JSON numbers; a truth value is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


class GradeItem(BaseModel):
    """One check. Example: {"response": "so \\\\boxed{7}", "gold": 7, "grader": "math"}."""

    model_config = ConfigDict(extra="forbid")

    response: str
    gold: Annotated[str, BeforeValidator(_text_of_number)]
    grader: str = "math"
    timeout_s: float | None = Field(None, gt=0, description="default: the service's")


class GradeRequest(BaseModel):
    """`{"items": [...]}`, or the fields of one item."""

    model_config = ConfigDict(extra="forbid")

    items: list[GradeItem]

    @model_validator(mode="before")
    @classmethod
    def _one_is_many(cls, value: Any) -> Any:
        return {"items": [value]} if isinstance(value, dict) and "response" in value else value


class GradeResponse(BaseModel):
    outcomes: list[Outcome]


@router.post(
    "/grade",
    responses={
        400: {"description": "the body is not JSON"},
        413: {"description": "the request is too large"},
        503: {"description": "too many checks wait already"},
    },
)
async def grade(body: GradeRequest, request: Request) -> GradeResponse:
    """Grade each item; outcome i belongs to item i."""
    limits = cast(LimitsConfig, request.app.state.limits)
    pool = cast(GradingPool, request.app.state.pool)
    _refuse_beyond(body.items, limits, pool)
    checks = [
        Check(item.grader, item.response, item.gold, item.timeout_s or limits.default_timeout_s)
        for item in body.items
    ]
    return GradeResponse(outcomes=await pool.grade(checks))


@router.get("/graders")
async def list_graders(request: Request) -> dict[str, list[str]]:
    return {"graders": cast(GradingPool, request.app.state.pool).grader_names}


def _refuse_beyond(items: list[GradeItem], limits: LimitsConfig, pool: GradingPool) -> None:
    if len(items) > limits.max_items:
        message = f"{len(items)} items exceed {limits.max_items}; send several requests"
        raise HTTPException(413, _detail("items", message))
    if pool.depth > limits.max_queued_checks:
        message = f"{pool.depth} checks wait, more than {limits.max_queued_checks}; try later"
        raise HTTPException(503, _detail("items", message), headers={"Retry-After": "1"})
    names = pool.grader_names
    bounds = (
        ("response", limits.max_response_chars, "characters"),
        ("gold", limits.max_gold_chars, "characters"),
    )
    for place, item in enumerate(items):
        for key, bound, unit in bounds:
            if (size := len(getattr(item, key))) > bound:
                raise _invalid(place, key, f"{size} {unit} exceed {bound}")
        if (item.timeout_s or 0) > limits.max_timeout_s:
            raise _invalid(place, "timeout_s", f"{item.timeout_s} exceeds {limits.max_timeout_s}")
        if item.grader not in names:
            raise _invalid(place, "grader", f"no {item.grader!r}; there are {', '.join(names)}")


def _invalid(place: int, key: str, message: str) -> HTTPException:
    return HTTPException(422, _detail(f"items.{place}.{key}", message))


def _detail(key: str, message: str) -> list[dict[str, str]]:
    return [{"key": key, "message": message}]


async def answer_invalid(_: Request, err: Exception) -> JSONResponse:
    """Name what is wrong without echoing a body of megabytes."""
    assert isinstance(err, RequestValidationError)
    errors = err.errors()
    detail = [
        {"key": ".".join(str(part) for part in error["loc"][1:]), "message": error["msg"]}
        for error in errors[:MAX_ERRORS_SHOWN]
    ]
    is_json = not any(error["type"] == "json_invalid" for error in errors)
    return JSONResponse({"detail": detail}, status_code=422 if is_json else 400)


class BodyLimit:
    """Answers 413 as soon as a request's body is larger than it may be."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, _detail("body", self._text))
            return message

        await self._app(scope, counted, send)

    @property
    def _text(self) -> str:
        return f"the body exceeds {self._max_bytes} bytes"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = JSONResponse({"detail": _detail("body", self._text)}, status_code=413)
        await answer(scope, receive, send)
