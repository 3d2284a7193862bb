"""Ctrl-C: what goes on without whoever watched, and what does not."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from services.cli import watch
from services.cli.demo import _tell_left
from shared.tasks import end


async def test_whoever_stops_watching_is_told_that_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = asyncio.Event()

    async def forever(*_: object, **__: object) -> int:
        begun.set()
        return int(await asyncio.Future[int]())

    monkeypatch.setattr(watch, "_follow", forever)
    watching = asyncio.create_task(watch.follow_job("http://x", "demo-1f3a", as_json=False))
    await asyncio.wait_for(begun.wait(), 60)
    await end(watching)
    assert "No longer watching; demo-1f3a goes on" in capsys.readouterr().err


def test_an_interrupted_demo_says_where_its_run_is(tmp_path: Path) -> None:
    said = io.StringIO()
    _tell_left(tmp_path / "demo-1f3a", Console(file=said, width=40))
    assert f"demo-1f3a did not end; what it did is in {tmp_path / 'demo-1f3a'}" in said.getvalue()
    assert "tandem submit" in said.getvalue()
