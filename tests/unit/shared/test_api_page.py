"""The page of a service's REST: all of its document, nothing else, and nothing of it as markup."""

import re
from typing import Literal

import httpx
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from shared.api_page import render_api, serve_api_page


class Body(BaseModel):
    """What is <sent>."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    number: int = Field(3, ge=1, le=9)
    """How many & why."""
    kind: Literal["a", "b"]
    """One of two."""
    more: list["Body"] | None = None
    """Further ones."""


def make_app() -> FastAPI:
    app = FastAPI(title="A service", docs_url=None, redoc_url=None)

    @app.post("/v1/things/{name}", responses={409: {"description": "it is <there>"}})
    async def put(name: str, body: Body) -> Body:
        """Put a <thing>."""
        return body

    serve_api_page(app)
    return app


async def test_the_page_is_served_alone() -> None:
    transport = httpx.ASGITransport(make_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert (await http.get("/redoc")).status_code == 404
        assert "/docs" not in (await http.get("/openapi.json")).json()["paths"]
    assert "<script" not in answer.text
    assert re.findall(r"https?://[^\s\"<]+", answer.text) == []


def test_routes_and_fields_are_there_in_words() -> None:
    page = render_api(make_app().openapi())
    for said in (
        "<b>POST</b> /v1/things/{name}",
        "Put a &lt;thing&gt;.",
        "What is &lt;sent&gt;.",
        "it is &lt;there&gt;",
        "How many &amp; why. Default: 3.",
        "integer (≥ 1, ≤ 9)",
        "<code>a</code> or <code>b</code>",
        'list of <a href="#Body-Input">Body-Input</a> or null',
        "more (optional)",
    ):
        assert said in page, said
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))
