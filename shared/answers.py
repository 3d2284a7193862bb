"""Answers to requests that are no requests: which key, what is wrong with it.

Nothing of the body is echoed but its keys, and those escaped: a body may be megabytes long, and may
hold what JSON cannot (NaN, half a character), which would turn a refusal into a failure.
"""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

MAX_ERRORS_SHOWN = 20


class EscapedJSONResponse(JSONResponse):
    """JSON in ASCII, so that any string can be told."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def answer_malformed(app: FastAPI) -> None:
    """Let `app` answer 422 with `detail`: a list of key, value (null) and message."""
    app.add_exception_handler(RequestValidationError, _answer)


async def _answer(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestValidationError)
    problems = [
        {
            "key": ".".join(str(part) for part in error["loc"][1:]) or "the body",
            "value": None,
            "message": error["msg"],
        }
        for error in err.errors()[:MAX_ERRORS_SHOWN]
    ]
    return EscapedJSONResponse({"detail": problems}, status_code=422)
