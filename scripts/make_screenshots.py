"""Make the pictures of the pages in docs/images: `python -m scripts.make_screenshots`.

The demo is started here on free ports, looked at while it trains, and ended with it. Needs Chromium
(`apt-get install chromium`) and what the tests need.
"""

import argparse
import asyncio
import re
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

IMAGES = Path("docs/images")
WIDTH, HEIGHT = 1440, 1000
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_screenshots")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--trainer", help="of a running stack; instead of a demo of its own")
    parser.add_argument("--compare", nargs=2, help="two run folders; only their comparison")
    options = parser.parse_args()
    asyncio.run(_make(options))


async def _make(options: argparse.Namespace) -> None:
    async with asyncio.timeout(DEADLINE_S), async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox"]
        )
        if options.compare:
            await _of_two_runs(chromium, *options.compare)
        elif options.trainer:
            await _take_all(chromium, options.trainer)
        else:
            await _of_a_demo(chromium, options.steps)
        await chromium.close()


async def _of_two_runs(chromium: Browser, a: str, b: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pair.html"
        command = [sys.executable, "-m", "services.cli", "runs", "compare", a, b, "--page", path]
        process = await asyncio.create_subprocess_exec(*command)
        if await process.wait():
            raise SystemExit(f"{a} and {b} cannot be compared")
        page = await _page(chromium, f"file://{path}", "light", width=1100, height=1560)
        await _save(page, "runs-compare")


async def _of_a_demo(chromium: Browser, steps: int) -> None:
    command = [sys.executable, "-m", "services.cli", "demo", "--steps", str(steps)]
    process = await asyncio.create_subprocess_exec(*command, "--ports-from", "0", stdout=PIPE)
    try:
        url = await _address(process, at_step=steps - 2)
        reading = asyncio.create_task(_read(process))
        await _take_all(chromium, url)
        await reading
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(process: Process, *, at_step: int) -> str:
    """Of the trainer, once the run has come to `at_step`."""
    assert process.stdout is not None
    url = ""
    async for line in process.stdout:
        text = line.decode()
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/", text):
            url = url or found[1]
        if (found := re.match(r"step\s+(\d+)/", text)) and int(found[1]) >= at_step:
            return url
    raise SystemExit("the demo ended before there was anything to see")


async def _read(process: Process) -> None:
    assert process.stdout is not None
    async for _ in process.stdout:
        pass


async def _take_all(chromium: Browser, url: str) -> None:
    for scheme in ("light", "dark"):
        page = await _page(chromium, url, scheme)
        await page.locator("#charts .u-wrap").nth(11).wait_for()
        await page.wait_for_timeout(1000)  # for curves to be drawn
        await _save(page, f"dashboard-{scheme}", whole=scheme == "light")
    await page.locator("#new").click()
    await page.locator("#fields input").first.wait_for()
    await page.locator('input[name="steps"]').fill("0")
    await page.locator("#submit").click()
    await page.locator('[id="error-steps"]:not(:empty)').wait_for()
    await _save(page, "job-form")
    job_id = await page.locator("#name").inner_text()
    page = await _page(chromium, f"{url}/samples#{job_id}", "light")
    await page.locator("#list a").nth(1).click()
    await page.locator(".tokens span").first.wait_for()
    await _save(page, "samples")
    page = await _page(chromium, url, "light", width=390, height=844)
    await page.locator("#charts .u-wrap").nth(11).wait_for()
    await page.locator("#tiles dd").last.wait_for()
    await _save(page, "dashboard-small")
    page = await _page(chromium, f"{url}/evals", "light")
    await page.locator("table a").first.click()
    await page.locator("h2").first.wait_for()
    await _save(page, "evaluation")


async def _page(
    chromium: Browser, url: str, scheme: str, *, width: int = WIDTH, height: int = HEIGHT
) -> Page:
    context = await chromium.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = await context.new_page()
    await page.goto(url)
    return page


async def _save(page: Page, name: str, *, whole: bool = False) -> None:
    path = IMAGES / f"{name}.png"
    await page.screenshot(path=path, full_page=whole)
    print(path)


if __name__ == "__main__":
    main()
