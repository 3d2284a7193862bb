"""`profile JOB`: every process of a running job on one time line, and who waits for whom."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.run import run
from services.client import NoSuchJob, TandemClient
from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.job_answers import ProfileResult, ProfileStatus
from shared.refusals import sentences

_POLL_S = 0.5


def profile(
    job_id: Annotated[str, typer.Argument(help="A job in progress.")],
    steps: Annotated[int, typer.Option(help="Steps to profile.", min=1, max=50)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Where the trace goes; default: JOB-ID.trace.json here.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Longest wait in seconds.", min=1)
    ] = 600.0,
    trainer: Annotated[
        str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
    ] = "http://127.0.0.1:8700",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Record what trainer, ranks, engines and services do for a few steps."""

    async def command() -> int:
        async with TandemClient(trainer, patience_s=10) as client:
            found = await _taken(client, job_id, steps, timeout_s)
            path = out or Path(f"{job_id}-{found.profile_id}.trace.json")
            path.write_text(json.dumps(await client.profile_trace(job_id, found.profile_id)))
        assert found.result is not None  # it is done
        result = found.result
        if as_json:
            typer.echo(json.dumps({**result.model_dump(), "trace": str(path)}))
        else:
            _show(result, path)
        return 0

    run(command())


async def _taken(client: TandemClient, job_id: str, steps: int, timeout_s: float) -> ProfileStatus:
    """Ask for a profile and wait until it is done."""
    try:
        found = await client.ask_profile(job_id, steps)
    except HttpFailed as err:
        if err.status in (404, 409):
            raise NoSuchJob("; ".join(sentences(err.body))) from err
        raise
    deadline_s = time.monotonic() + timeout_s
    while found.state in ("asked", "recording"):
        if time.monotonic() > deadline_s:
            seen = f"{found.steps_seen} of {found.steps} steps seen"
            raise DeadlineExceeded(f"profile {found.profile_id} of {job_id} ({seen})", timeout_s)
        await asyncio.sleep(_POLL_S)
        try:
            found = await client.profile(job_id, found.profile_id)
        except HttpFailed as err:
            if err.status != 404:
                raise
            raise TandemError(f"{job_id} ended before the profile began.") from err
    if found.state == "failed":
        raise TandemError(f"profile {found.profile_id} of {job_id} failed: {found.error}")
    return found


def _show(result: ProfileResult, path: Path) -> None:
    console = Console()
    console.print(waits_table(result))
    for sentence in result.sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    if result.missing:
        console.print(f"Nothing came from {', '.join(result.missing)}.", style="yellow")
    for name, number in result.dropped_spans.items():
        console.print(f"{number} spans of {name} did not fit.", style="yellow")
    console.print(f"time line: {path} (open it in https://ui.perfetto.dev)", soft_wrap=True)


def waits_table(result: ProfileResult) -> Table:
    """Each process's time: what it works, whom it waits for, when nothing is asked of it."""
    steps, seconds = result.steps, result.seconds
    table = Table(
        "process", "works", "waits", "for whom", "nothing to do",
        title=f"{result.job_id}: {steps} steps, {seconds:.2f} s", box=None, header_style="dim",
    )  # fmt: skip
    for one in result.processes:
        whom = ", ".join(
            f"{who} {share:.0%}" for who, share in one.waits_for.items() if share >= 0.005
        )
        works, waits, nothing = (
            f"{share:.0%}" for share in (one.works, one.waits, one.nothing_to_do)
        )
        table.add_row(one.process, works, waits, whom or "–", nothing)
    return table
