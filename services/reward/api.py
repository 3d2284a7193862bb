"""`POST /v1/grade`: one check or thousands, within limits that a refusal names."""

from typing import Annotated, Any, cast

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from services.reward.config import LimitsConfig
from services.reward.grading import Asked, Grading
from shared.answers import failures
from shared.job_reward import OverlongSection, RewardPart
from shared.messages import Outcome
from shared.rest_parameters import MAX_NUMBER
from shared.spans import span

router = APIRouter(prefix="/v1", tags=["grading"])


def _text_of_number(value: Any) -> Any:
    """Golds are often JSON numbers; a truth value is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


class GradeItem(BaseModel):
    """One check. Example: {"response": "so \\\\boxed{7}", "gold": 7, "grader": "math"}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    response: str
    """What the policy wrote."""
    gold: Annotated[str, BeforeValidator(_text_of_number)]
    """The right answer."""
    grader: str = "math"
    """Name of the grader."""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds for this check; null: the service's own limit."""
    parts: list[RewardPart] = []
    """Further graders whose values are added, each with its weight."""
    overlong: OverlongSection | None = None
    """Penalty for long responses; null: none."""
    num_tokens: int = Field(0, ge=0, le=MAX_NUMBER)
    """Tokens of the response, for the penalty for length."""

    def asked(self, default_timeout_s: float) -> Asked:
        return Asked(
            grader=self.grader,
            response=self.response,
            gold=self.gold,
            timeout_s=self.timeout_s or default_timeout_s,
            parts=tuple(self.parts),
            overlong=self.overlong,
            num_tokens=self.num_tokens,
        )


class GradeRequest(BaseModel):
    """`{"items": [...]}`, or the fields of one item."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    items: list[GradeItem]
    """What to grade, up to 10,000."""

    @model_validator(mode="before")
    @classmethod
    def _one_is_many(cls, value: Any) -> Any:
        return {"items": [value]} if isinstance(value, dict) and "response" in value else value


class GraderList(BaseModel):
    """Example: {"graders": ["arithmetic", "math"]}."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    graders: list[str]
    """Names, the remote ones included."""


class GradeResponse(BaseModel):
    """Outcome i belongs to item i."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    outcomes: list[Outcome]
    """One for each item, in order."""


@router.post(
    "/grade",
    responses=failures(
        {
            413: "the body or the number of items is larger than allowed; the limit is named",
            503: "too many checks wait already; `Retry-After` says when to try again",
        }
    ),
)
async def grade(body: GradeRequest, request: Request) -> GradeResponse:
    """Grade each item; outcome i belongs to item i."""
    limits = cast(LimitsConfig, request.app.state.limits)
    grading = cast(Grading, request.app.state.grading)
    asked = [item.asked(limits.default_timeout_s) for item in body.items]
    _refuse_beyond(asked, limits, grading)
    with span("grade", "requests", items=len(asked)):
        return GradeResponse(outcomes=await grading.grade(asked))


@router.get("/graders")
async def list_graders(request: Request) -> GraderList:
    """What `grader` may name."""
    return GraderList(graders=cast(Grading, request.app.state.grading).names)


def _refuse_beyond(items: list[Asked], limits: LimitsConfig, grading: Grading) -> None:
    if len(items) > limits.max_items:
        message = f"{len(items)} items exceed {limits.max_items}; send several requests"
        raise HTTPException(413, _detail("items", message))
    if (depth := grading.pool.depth) > limits.max_queued_checks:
        message = f"{depth} checks wait, more than {limits.max_queued_checks}; try later"
        raise HTTPException(503, _detail("items", message), headers={"Retry-After": "1"})
    bounds = (
        ("response", limits.max_response_chars, "characters"),
        ("gold", limits.max_gold_chars, "characters"),
    )
    for place, item in enumerate(items):
        for key, bound, unit in bounds:
            if (size := len(getattr(item, key))) > bound:
                raise _invalid(place, key, f"{size} {unit} exceed {bound}")
        if item.timeout_s > limits.max_timeout_s:
            raise _invalid(place, "timeout_s", f"{item.timeout_s} exceeds {limits.max_timeout_s}")
        if (unknown := grading.unknown(item)) is not None:
            known = ", ".join(grading.names)
            raise _invalid(place, "grader", f"no {unknown!r}; there are {known}")


def _invalid(place: int, key: str, message: str) -> HTTPException:
    return HTTPException(422, _detail(f"items.{place}.{key}", message))


def _detail(key: str, message: str) -> list[dict[str, str | None]]:
    return [{"key": key, "value": None, "message": message}]
