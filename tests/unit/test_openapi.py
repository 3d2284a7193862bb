"""Every service's OpenAPI document says what each route takes, answers and refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from tests.rest_apps import APPS

# Free on purpose; each says so. All other objects name their fields, or are maps of one type.
FREE = {"EvalStatus.result", "Event.fields", "Preset.document", "Problem.allowed", "Problem.value"}
FAILURE = {"$ref": "#/components/schemas/Failure"}
PLAIN = ("text/", "application/msgpack")

Schema = dict[str, Any]


def routes(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"{method} {path}", route


def untold(app: FastAPI) -> Iterator[str]:
    """What a reader of the document would have to guess."""
    document = app.openapi()
    seen: set[str] = set()
    for name, route in routes(document):
        if not route.get("description") or not route.get("summary"):
            yield f"{name} has no description"
        for one in route.get("parameters", ()):
            if not one.get("description"):
                yield f"{name}: parameter {one['name']} has no description"
        for place, content in _bodies(route):
            for media, told in content.items():
                yield from _untold(told.get("schema", {}), f"{name} {place}", document, seen)
                if media.startswith(PLAIN) and told["schema"].get("type") != "string":
                    yield f"{name} {place}: {media} is no string"


def _bodies(route: Schema) -> Iterator[tuple[str, Schema]]:
    if "requestBody" in route:
        yield "body", route["requestBody"]["content"]
    for status, answer in route["responses"].items():
        yield status, answer.get("content", {})


def _untold(schema: Schema, place: str, document: Schema, seen: set[str]) -> Iterator[str]:
    if "$ref" in schema:
        place = schema["$ref"].rpartition("/")[2]
        if place in seen:
            return
        seen.add(place)
        schema = document["components"]["schemas"][place]
        if not schema.get("description"):
            yield f"{place} has no description"
    told = schema.get("description", "")
    if not set(schema) - {"title", "description", "default"} and place not in FREE:
        yield f"{place} may be anything"
    if schema.get("type") == "object" and "properties" not in schema:
        inner = schema.get("additionalProperties", True)
        if inner is True and "free map" not in told:
            yield f"{place} is an untyped object that does not say so"
    for field, inner in schema.get("properties", {}).items():
        if not inner.get("description"):
            yield f"{place}.{field} has no description"
        yield from _untold(inner, f"{place}.{field}", document, seen)
    parts = [schema.get("items"), schema.get("additionalProperties")]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        # a map that may be null has its description one level up
        parts += [{"description": told, **one} for one in schema.get(key, ())]
    for inner in parts:
        if isinstance(inner, dict):
            yield from _untold(inner, place, document, seen)


def unlisted(app: FastAPI) -> Iterator[str]:
    """Refusals that are not listed in the form in which they come."""
    for name, route in routes(app.openapi()):
        answers = route["responses"]
        takes = {"422"} if route.get("parameters") or "requestBody" in route else set()
        if "requestBody" in route:
            takes |= {"413"}
        if "{" in name and "update" not in name.partition("{")[0]:
            takes |= {"404"} if "profiles" not in name or "get" in name else {"409"}
        yield from (f"{name}: {status} is not listed" for status in takes - answers.keys())
        for status, answer in answers.items():
            if int(status) < 400 or name == "get /readyz":
                continue
            if not answer.get("description"):
                yield f"{name}: {status} has no description"
            if answer.get("content", {}).get("application/json", {}).get("schema") != FAILURE:
                yield f"{name}: {status} has no schema"


def test_a_submission_is_described_as_a_job() -> None:
    document = APPS["trainer"]().openapi()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/Job"}
    sections = {name for name in document["components"]["schemas"] if name.endswith("Section")}
    assert len(sections) >= 20


@pytest.mark.parametrize("service", APPS)
def test_everything_is_described(service: str) -> None:
    assert list(untold(APPS[service]())) == []


@pytest.mark.parametrize("service", APPS)
def test_every_refusal_is_listed_with_its_schema(service: str) -> None:
    assert list(unlisted(APPS[service]())) == []


def test_what_is_not_described_is_found() -> None:
    app = FastAPI()

    @app.post("/{name}")
    async def take(name: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    found = list(untold(app))
    assert "post /{name} has no description" in found
    assert "post /{name}: parameter name has no description" in found
    assert "post /{name} body is an untyped object that does not say so" in found
    assert "post /{name}: 422 has no schema" in list(unlisted(app))
