"""`/docs` of a service: its OpenAPI document as a page of its own, without scripts or the internet.

Everything on it comes from the document, so it says what `/openapi.json` says. Text is escaped.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_STYLE = (Path(__file__).parent / "api_page.css").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_REF = "#/components/schemas/"

Document = Mapping[str, Any]


def serve_api_page(app: FastAPI) -> None:
    """Have `/docs` answer; make the application with `docs_url=None, redoc_url=None`."""

    @cache
    def page() -> str:
        return render_api(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(), headers=_HEADERS)


def render_api(document: Document) -> str:
    title = escape(document["info"]["title"])
    routes = [
        (method.upper(), path, route)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    schemas = document.get("components", {}).get("schemas", {})
    contents = "".join(
        f'<li><a href="#{_anchor(method, path)}"><b>{method}</b> {escape(path)}</a></li>'
        for method, path, _ in routes
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · REST</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{title}: REST</h1><p>For programs: <a href="/openapi.json">/openapi.json</a></p>'
        f'<nav aria-label="Routes"><ul>{contents}</ul></nav>'
        f"{''.join(_route(*one) for one in routes)}"
        f"<h2>Bodies</h2>{''.join(_schema(name, one) for name, one in sorted(schemas.items()))}"
        "</main></body></html>\n"
    )


def _route(method: str, path: str, route: Document) -> str:
    told = route.get("description") or route.get("summary", "")
    parts = [
        f'<section id="{_anchor(method, path)}"><h2><b>{method}</b> {escape(path)}</h2>',
        f"<p>{escape(told)}</p>",
    ]
    if parameters := route.get("parameters"):
        rows = [
            (one["name"], f"{one['in']}, {_type(one['schema'])}", one.get("description", ""))
            for one in parameters
        ]
        parts.append(_table(("parameter", "type", ""), rows))
    if "requestBody" in route:
        parts.append(f"<p>Body: {_content(route['requestBody'])}</p>")
    answers = [
        (status, _content(answer), answer.get("description", ""))
        for status, answer in route["responses"].items()
    ]
    parts.append(_table(("answer", "body", ""), answers))
    return "".join(parts) + "</section>"


def _schema(name: str, schema: Document) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            field if field in required else f"{field} (optional)",
            _type(described),
            " ".join(_told(described)),
        )
        for field, described in schema.get("properties", {}).items()
    ]
    title = f'<section id="{escape(name)}"><h3>{escape(name)}</h3>'
    told = f"<p>{escape(schema.get('description', ''))}</p>"
    fields = _table(("field", "type", ""), rows) if rows else ""
    return f"{title}{told}{fields}</section>"


def _told(field: Document) -> Iterator[str]:
    if "description" in field:
        yield field["description"]
    if field.get("default") is not None:
        yield f"Default: {field['default']}."


def _content(described: Document) -> str:
    """Markup: the media type, and a link to the schema where there is one."""
    found = [
        f"{escape(media)} {_type(one.get('schema', {}))}".strip()
        for media, one in described.get("content", {}).items()
    ]
    return ", ".join(found) or "–"


def _type(schema: Document) -> str:
    """Markup: a schema's type in words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in schema:
            return " or ".join(_type(one) for one in schema[kind])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(one))}</code>" for one in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any"))) + _bounds(schema)


def _bounds(schema: Document) -> str:
    names = {
        "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<",
        "maxLength": "length ≤",
    }  # fmt: skip
    found = [f"{sign} {schema[name]:g}" for name, sign in names.items() if name in schema]
    return f" ({escape(', '.join(found))})" if found else ""


def _table(head: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> str:
    """The second column is markup already, the others are text."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{markup}</td><td>{escape(told)}</td></tr>"
        for name, markup, told in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".replace("{", "").replace("}", "").replace("/", "-"))
