"""Refusals over HTTP: one form for all services, and which of them an operation may give.

Of a malformed body only its keys and short values are echoed, and escaped: it may be megabytes
long, and may hold what JSON cannot (NaN, half a character), which would turn a refusal into a
failure.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

import redis.exceptions
from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

MAX_ERRORS_SHOWN = 20
MAX_SHOWN_CHARS = 200
MALFORMED = "a key or a value is wrong; each is named, with what is wrong with it"
TOO_LARGE = "the body is larger than allowed; the limit is named"
NO_BROKER = "the broker does not answer"
Responses = dict[int | str, dict[str, Any]]


class Problem(BaseModel):
    """One wrong key. Example: {"key": "steps", "value": 0, "message": "must be at least 1"}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    key: str
    """Where it is, from the body, query or path inwards: `actor.optimizer.learning_rate`."""
    value: Any = None
    """Any JSON value: the one that was given; null where none was or where it is not repeated."""
    message: str
    """What is wrong with it, with the bound."""
    allowed: Any = None
    """Any JSON value: the values or keys that are allowed, where the message does not say it."""


class Failure(BaseModel):
    """The answer to whatever is refused. Example: {"detail": "there is no job sums-1f3a"}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    detail: str | list[Problem]
    """One sentence, or one entry for each wrong key, at most 20 of a malformed request."""


def failures(told: Mapping[int, str]) -> Responses:
    """`responses` of a route: by status, when it is given. 413 and 422 are listed by themselves."""
    return {status: {"model": Failure, "description": why} for status, why in told.items()}


class EscapedJSONResponse(JSONResponse):
    """JSON in ASCII, so that any string can be told."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def answer_malformed(app: FastAPI) -> None:
    """Let `app` answer 422 to what is no request, 503 without its broker, and document both."""
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer_unread)
    for kind in (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        app.add_exception_handler(kind, _answer_without_broker)
    made = app.openapi

    def documented() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_failures(made())
        return app.openapi_schema

    app.openapi = documented  # type: ignore[method-assign]


def shown(value: Any) -> Any:
    """A number or a text as it was given, cut where it is long; null for all else."""
    if not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = str(value)
    return value if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


async def _answer(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestValidationError)
    problems = [
        {
            "key": ".".join(str(part) for part in error["loc"][1:]) or "the body",
            "value": shown(error.get("input")),
            "message": error["msg"],
        }
        for error in err.errors()[:MAX_ERRORS_SHOWN]
    ]
    return EscapedJSONResponse({"detail": problems}, status_code=422)


async def _answer_unread(request: Request, err: Exception) -> Response:
    """A body that is no text, or nested too deeply, is 400 to FastAPI, which does not say why."""
    assert isinstance(err, HTTPException)
    if err.status_code != 400 or err.__cause__ is None:
        return await http_exception_handler(request, err)
    problem = {"key": "the body", "value": None, "message": f"cannot be read: {err.__cause__}"}
    return EscapedJSONResponse({"detail": [problem]}, status_code=422)


async def _answer_without_broker(_: Request, err: Exception) -> JSONResponse:
    return EscapedJSONResponse({"detail": f"{NO_BROKER}: {err}"}, status_code=503)


def _with_failures(document: dict[str, Any]) -> dict[str, Any]:
    """What FastAPI would answer by itself is replaced by what is answered here."""
    schemas = cast(dict[str, Any], document["components"]["schemas"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    made = Failure.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= {**made.pop("$defs"), "Failure": made}
    told = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
    for route in (one for methods in document["paths"].values() for one in methods.values()):
        answers = route["responses"]
        for answer in answers.values():  # a refusal is JSON also where the answer is a page
            if told["application/json"] in answer.get("content", {}).values():
                answer["content"] = told
        if "requestBody" in route:
            answers.setdefault("413", {"description": TOO_LARGE, "content": told})
        if "requestBody" in route or route.get("parameters"):
            named = answers.get("422", {})
            if "HTTPValidationError" in json.dumps(named) or not named:
                answers["422"] = {"description": MALFORMED, "content": told}
    return document
