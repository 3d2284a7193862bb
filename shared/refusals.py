"""What was wrong, in sentences: people are told no JSON, error number or class name."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

MAX_EXCERPT_CHARS = 500


def sentences(body: str) -> list[str]:
    """One per entry of `detail`: key, value, what is wrong, what is allowed.

    Of a body without one, its beginning.
    """
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [body[:MAX_EXCERPT_CHARS]]
    entries = detail if isinstance(detail, list) else [detail]
    return [_sentence(entry) for entry in entries]


def _sentence(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return str(entry)
    text = str(entry.get("message") or entry.get("msg") or dict(entry))
    loc = entry.get("loc")
    key = entry.get("key") or ".".join(map(str, loc[1:] if isinstance(loc, list) else ()))
    if key:
        given = f" = {json.dumps(entry['value'])}" if entry.get("value") is not None else ""
        text = f"{key}{given}: {text}"
    allowed = entry.get("allowed")
    if isinstance(allowed, list):
        allowed = ", ".join(map(str, allowed))
    return f"{text} (allowed: {allowed})" if allowed else text


def fault(err: OSError | ValueError) -> str:
    """What was wrong, for people: without error numbers, and each thing said once."""
    if isinstance(err, OSError):
        where = f"{err.filename}: " if err.filename is not None else ""
        return f"{where}{err.strerror or err}"
    if isinstance(err, ValidationError):
        first = err.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return (f"{key}: " if key else "") + first["msg"].removeprefix("Value error, ")
    return str(err)
