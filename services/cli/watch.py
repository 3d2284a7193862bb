"""Following a job until it ends, and what its end means for the exit code.

A paused job has not ended, yet nothing more happens without an operator: watching ends there, too.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing

import typer
from rich.console import Console
from rich.live import Live

from services.cli.progress import JobView
from services.cli.server_news import ServerNews
from services.client import TandemClient
from shared.errors import HttpFailed
from shared.job_answers import JobStatus
from shared.registry import Replica
from shared.tasks import end

_REDRAW_S = 0.25
_ASK_SERVERS_S = 1.0
_SILENT_S = 1.0  # a trainer that is there answers sooner
PATIENCE_S = 60.0  # one that was restarted is back by then

Notes = Callable[[], Mapping[str, str]]


async def watch_job(
    client: TandemClient,
    job_id: str,
    console: Console,
    *,
    after: int = 0,
    notes: Notes = dict,
    tell_servers: bool = False,
) -> JobView:
    """Show the job until it has ended or is paused; `tell_servers`: also who comes and goes."""
    view = JobView(job_id, steps=(await first_answer(client, job_id)).steps)
    news = ServerNews() if tell_servers else None
    async with _shown(client, view, console, notes, news) as tell:

        def silent() -> None:
            tell(_silence(client))

        events = client.events(job_id, after=after, on_silence=silent)
        async with aclosing(events):
            async for numbered in events:
                line = view.apply(numbered.event)
                if line is not None:
                    tell(line)
        status = await client.job(job_id)
        view.state, view.error = status.state, status.error or view.error
    return view


@contextlib.asynccontextmanager
async def _shown(
    client: TandemClient, view: JobView, console: Console, notes: Notes, news: ServerNews | None
) -> AsyncIterator[Callable[[str], None]]:
    """A redrawn block on a terminal, plain lines elsewhere; yields how to tell a line."""
    servers: list[Replica] = []
    if not console.is_terminal:

        def tell_plainly(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        async with _asking(client, servers, news, tell_plainly):
            yield tell_plainly
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def draw() -> None:
            live.update(view.block(servers, notes()), refresh=True)

        def tell(line: str) -> None:
            if not line.startswith("step "):
                live.console.print(line, highlight=False, markup=False)
            draw()

        drawing = asyncio.create_task(_redraw(draw))
        try:
            async with _asking(client, servers, news, tell):
                yield tell
        finally:
            await end(drawing)
            draw()


async def _redraw(draw: Callable[[], None]) -> None:
    while True:
        draw()
        await asyncio.sleep(_REDRAW_S)


@contextlib.asynccontextmanager
async def _asking(
    client: TandemClient,
    servers: list[Replica],
    news: ServerNews | None,
    tell: Callable[[str], None],
) -> AsyncIterator[None]:
    """Keeps `servers` as they are now, and tells the news of them."""

    async def ask() -> None:
        while True:
            with contextlib.suppress(HttpFailed):  # away for a moment: the last states stay
                servers[:] = await client.servers()
                for line in news.look(servers) if news else ():
                    tell(line)
            await asyncio.sleep(_ASK_SERVERS_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        await end(asking)


async def first_answer(client: TandemClient, job_id: str) -> JobStatus:
    """The job; that nobody answers is said at once, not when patience is over."""
    asking = asyncio.create_task(client.job(job_id))
    try:
        await asyncio.wait({asking}, timeout=_SILENT_S)
        if not asking.done():
            _tell_silence(client)
        return await asking
    finally:
        await end(asking)


def _tell_silence(client: TandemClient) -> None:
    typer.echo(_silence(client), err=True)


def _silence(client: TandemClient) -> str:
    return f"No trainer answers at {client.url}: trying for {client.patience_s:g} s more."


async def follow_job(trainer: str, job_id: str, *, as_json: bool) -> int:
    """Follow a job to its end; the exit code is 0 only when it finished."""
    try:
        return await _follow(trainer, job_id, as_json=as_json)
    except asyncio.CancelledError:
        typer.echo(
            f"No longer watching; {job_id} goes on. `tandem watch {job_id}` shows it again, "
            f"`tandem pause {job_id}` and `cancel` stop it.",
            err=True,
        )
        raise


async def _follow(trainer: str, job_id: str, *, as_json: bool) -> int:
    async with TandemClient(trainer, patience_s=PATIENCE_S) as client:
        if not as_json:
            view = await watch_job(client, job_id, Console(), tell_servers=True)
            return 0 if view.state == "finished" else 1
        await first_answer(client, job_id)
        async for numbered in client.events(job_id, on_silence=lambda: _tell_silence(client)):
            typer.echo(numbered.event.model_dump_json())
        return 0 if (await client.job(job_id)).state == "finished" else 1
