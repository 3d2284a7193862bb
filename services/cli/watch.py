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
from services.client import TandemClient
from shared.errors import HttpFailed
from shared.registry import Replica
from shared.tasks import end

_REDRAW_S = 0.25
_ASK_SERVERS_S = 1.0

Notes = Callable[[], Mapping[str, str]]


async def watch_job(
    client: TandemClient,
    job_id: str,
    console: Console,
    *,
    after: int = 0,
    notes: Notes = dict,
) -> JobView:
    """Show the job until it has ended or is paused."""
    view = JobView(job_id, steps=(await client.job(job_id)).steps)
    async with _shown(client, view, console, notes) as tell:
        async with aclosing(client.events(job_id, after=after)) as events:
            async for numbered in events:
                line = view.apply(numbered.event)
                if line is not None:
                    tell(line)
        status = await client.job(job_id)
        view.state, view.error = status.state, status.error or view.error
    return view


@contextlib.asynccontextmanager
async def _shown(
    client: TandemClient, view: JobView, console: Console, notes: Notes
) -> AsyncIterator[Callable[[str], None]]:
    """A redrawn block on a terminal, plain lines elsewhere; yields how to tell a line."""
    if not console.is_terminal:
        yield lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    servers: list[Replica] = []
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def draw() -> None:
            live.update(view.block(servers, notes()), refresh=True)

        def tell(line: str) -> None:
            if not line.startswith("step "):
                live.console.print(line, highlight=False, markup=False)
            draw()

        asking = asyncio.create_task(_ask_servers(client, servers))
        drawing = asyncio.create_task(_redraw(draw))
        try:
            yield tell
        finally:
            await end(drawing)
            await end(asking)
            draw()


async def _redraw(draw: Callable[[], None]) -> None:
    while True:
        draw()
        await asyncio.sleep(_REDRAW_S)


async def _ask_servers(client: TandemClient, servers: list[Replica]) -> None:
    while True:
        with contextlib.suppress(HttpFailed):  # away for a moment: the last states stay
            servers[:] = await client.servers()
        await asyncio.sleep(_ASK_SERVERS_S)


async def follow_job(trainer: str, job_id: str, *, as_json: bool) -> int:
    """Follow a job to its end; the exit code is 0 only when it finished."""
    async with TandemClient(trainer) as client:
        if not as_json:
            view = await watch_job(client, job_id, Console())
            return 0 if view.state == "finished" else 1
        async for numbered in client.events(job_id):
            typer.echo(numbered.event.model_dump_json())
        return 0 if (await client.job(job_id)).state == "finished" else 1
