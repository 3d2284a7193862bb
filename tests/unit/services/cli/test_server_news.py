"""Whoever watches from afar hears of servers that come, go, start again or are in trouble."""

import asyncio
import io

import pytest
from rich.console import Console

from services.cli import watch
from services.cli.progress import JobView
from services.cli.server_news import ServerNews
from services.client import TandemClient
from shared.registry import Replica


def replica(name: str, pid: int = 1, trouble: str = "") -> Replica:
    return Replica(service="reward", name=name, url="http://x", pid=pid, trouble=trouble)


def test_who_comes_goes_or_starts_again_is_told_once() -> None:
    news = ServerNews()
    a, b = replica("a"), replica("b")
    looks = [
        ([a, b], []),
        ([a, b], []),
        ([replica("a", pid=2), b], ["a was started again"]),
        ([replica("a", pid=2)], ["b is gone"]),
        ([replica("a", pid=2)], []),
        ([replica("a", pid=2), b, replica("c")], ["b is back", "c joined"]),
        ([replica("a", pid=2, trouble="no port"), b], ["c is gone", "a: no port"]),
        ([replica("a", pid=2, trouble="no port"), b], []),
        ([a, b, replica("c", pid=3)], ["a was started again", "c was started again"]),
    ]
    for servers, lines in looks:
        assert news.look(servers) == lines


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_watch_tells_that_a_service_was_started_again(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    asked = 0
    told = asyncio.Event()

    async def servers(_: TandemClient) -> list[Replica]:
        nonlocal asked
        asked += 1
        if asked > 2:
            told.set()
        return [replica("reward-[b]0", pid=min(asked, 2))]

    monkeypatch.setattr(TandemClient, "servers", servers)
    monkeypatch.setattr(watch, "_ASK_SERVERS_S", 0.01)
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=80)
    async with TandemClient("http://127.0.0.1:1") as client:
        view = JobView("demo-1f3a", steps=3)
        async with watch._shown(client, view, console, dict, ServerNews()):
            await asyncio.wait_for(told.wait(), 60)
    assert said.getvalue().count("reward-[b]0 was started again") == 1
