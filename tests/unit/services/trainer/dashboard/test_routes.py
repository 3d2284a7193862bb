"""The page's files: all that it names is served, and nothing else is."""

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from services.trainer.dashboard.routes import router


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(router)
    with TestClient(app) as client:
        yield client


def test_all_that_the_page_and_its_modules_name_is_served(client: TestClient) -> None:
    named = re.findall(r'(?:src|href)="(/assets/[^"]+)"', client.get("/").text)
    assert "/assets/app.js" in named
    for path in named:
        answer = client.get(path)
        assert answer.status_code == 200, path
        for module in re.findall(r'from "\./([^"]+)"', answer.text):
            assert client.get(f"/assets/{module}").status_code == 200, module


@pytest.mark.parametrize(
    "name", ["page.html", "../routes.py", "%2e%2e/routes.py", "vendor", "x.js"]
)
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/assets/{name}").status_code == 404


def test_only_our_own_scripts_may_run(client: TestClient) -> None:
    answer = client.get("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]*\ssrc=)", answer.text)


def test_vendored_code_carries_its_licence(client: TestClient) -> None:
    assert "MIT License" in client.get("/assets/vendor/uPlot.LICENSE").text
