"""Every route of every service under hostile paths, queries and bodies, made from its OpenAPI.

Whatever comes, the answer is none of a failure of ours, is listed in the document, and where it
refuses says why in the one form for it.
"""

import json
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from redis.asyncio import Redis

from shared.answers import Failure
from tests.rest_apps import APPS

Schema = dict[str, Any]

TEXTS = ["", "nobody", "..", "../../etc/passwd", "a/b", "\0", "%00", "é" * 99, "x" * 5000, "'\"<b>"]
NUMBERS = ["-1", "0", "1.5", "1e999", "NaN", str(2**31), str(2**63), str(2**70), "9" * 5000]
VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    10**400,
    "",
    "\0",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    [{}],
]
RAW = [
    *(b"", b"{", b"null", b"[]", b"{}", b'"x"', b"1e999", b"NaN", b"\xff\xfe", b"\x81\xa1a\x01"),
    b"[" * 50_000,
    b'{"a":' * 50_000,
]
EXCUSED = {503, 504}  # without an engine, a job or a model there is nobody to ask


@pytest_asyncio.fixture(params=APPS)
async def app(
    request: pytest.FixtureRequest, redis: Redis, redis_url: str, tmp_path: Path
) -> AsyncIterator[FastAPI]:
    folder = {"runs_dir": tmp_path / "runs"} if request.param in ("evaluator", "trainer") else {}
    made = APPS[request.param](redis_url=redis_url, **folder)
    async with made.router.lifespan_context(made):
        yield made


@pytest.mark.timeout(240)
async def test_nothing_that_is_sent_is_answered_with_a_failure(app: FastAPI) -> None:
    document = app.openapi()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    found, num_asked = [], 0
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        for method, path, route in routes(document):
            for asked in attacks(method, path, route, document):
                answer = await http.send(http.build_request(method, **asked))
                num_asked += 1
                if said := wrong(answer, route):
                    found.append(f"{method} {path} {shown(asked)}: {said}")
    assert found == []
    assert num_asked > 10 * len(document["paths"])


def routes(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield method.upper(), path, route


def attacks(method: str, path: str, route: Schema, document: Schema) -> Iterator[Schema]:
    """Keyword arguments of requests; each is wrong in one place at least."""
    named = {one["name"]: one for one in route.get("parameters", ())}
    places = [name for name, one in named.items() if one["in"] == "path"]
    for text in [*TEXTS, *NUMBERS]:
        if places:
            yield {"url": filled(path, text)}
        for name, one in named.items():
            if one["in"] == "query":
                yield {"url": filled(path, "nobody"), "params": {name: text}}
            elif one["in"] == "header" and text.isascii() and text.isprintable():
                yield {"url": filled(path, "nobody"), "headers": {name: text}}
    if "requestBody" in route:
        for media, told in route["requestBody"]["content"].items():
            headers = {"content-type": media}
            for content in [*RAW, *bodies(told.get("schema", {}), document)]:
                yield {"url": filled(path, "1"), "content": content, "headers": headers}
        yield {"url": filled(path, "1"), "content": b"a=b", "headers": {"content-type": "text/x"}}


def filled(path: str, text: str) -> str:
    return re.sub(r"\{[^}]*\}", urllib.parse.quote(text, safe="") or "%20", path)


def bodies(schema: Schema, document: Schema) -> Iterator[bytes]:
    """One field of each kind that it has not; the others left out, or as they should be."""
    right = plain(schema, document)
    fields = resolved(schema, document).get("properties", {})
    if not isinstance(right, dict):
        return
    for name in [*fields, "no such field"]:
        for value in VALUES:
            yield json.dumps({name: value}).encode()
            yield json.dumps(right | {name: value}).encode()
    for value in VALUES:
        yield json.dumps(dict.fromkeys(fields, value)).encode()


def resolved(schema: Schema, document: Schema) -> Schema:
    """The schema behind references, and the first of several."""
    while True:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        elif several := schema.get("anyOf") or schema.get("oneOf"):
            schema = several[0]
        else:
            return schema


def plain(schema: Schema, document: Schema) -> Any:
    """A small value that it allows, as far as the schema says it."""
    schema = resolved(schema, document)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            needed = schema.get("required", ())
            return {name: plain(schema["properties"][name], document) for name in needed}
        case "array":
            return [plain(schema["items"], document)] * schema.get("minItems", 0)
        case "string":
            return "x" * max(1, schema.get("minLength", 1))
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
    return {}


def wrong(answer: httpx.Response, route: Schema) -> str:
    """What is wrong with it; empty where nothing is."""
    status = answer.status_code
    if status >= 500 and status not in EXCUSED:
        return f"{status} {answer.text[:300]}"
    if status < 400 or status == 405:  # a path that became another route's
        return ""
    if status != 404 and str(status) not in route["responses"]:
        return f"{status} is not listed: {answer.text[:300]}"
    try:
        said = Failure.model_validate(answer.json()).detail
    except ValueError as err:
        return f"{status} in another form: {answer.text[:200]} ({err})"
    return "" if said else f"{status} does not say why"


def shown(asked: Schema) -> str:
    return str({key: str(value)[:120] for key, value in asked.items() if key != "headers"})
