"""`weights list` and `weights rollback`: the versions of a job in progress, and the way back."""

import asyncio
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.run import run
from services.client import TandemClient
from shared.errors import DeadlineExceeded
from shared.job_answers import KeptVersions

weights = typer.Typer(help="Versions of a job's weights.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(help="A job in progress.")]
Trainer = Annotated[
    str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
]
LOCAL_TRAINER = "http://127.0.0.1:8700"


@weights.command("list")
def list_versions(
    job_id: JobId,
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show every version that can be served again."""

    async def command() -> int:
        async with TandemClient(trainer, patience_s=10) as client:
            kept = await client.weights(job_id)
        if as_json:
            typer.echo(kept.model_dump_json())
        else:
            Console().print(versions_table(kept))
        return 0

    run(command())


@weights.command()
def rollback(
    job_id: JobId,
    to: Annotated[int, typer.Option(help="The version; the current one ends a rollback.", min=0)],
    wait_s: Annotated[float, typer.Option(help="How long to wait until it is served.")] = 120.0,
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Have every server serve an older version; training waits until the current one is served."""

    async def command() -> int:
        async with TandemClient(trainer, patience_s=10) as client:
            await client.roll_back(job_id, to)
            names = await _served(client, job_id, to, wait_s)
        told = f"version {to} is served by {', '.join(names)}"
        typer.echo(json.dumps({"policy_version": to, "servers": names}) if as_json else told)
        return 0

    run(command())


async def _served(client: TandemClient, job_id: str, version: int, wait_s: float) -> list[str]:
    ends_s = time.monotonic() + wait_s
    while time.monotonic() < ends_s:
        kept = await client.weights(job_id)
        for one in kept.versions:
            if one.policy_version == version and one.servers:
                return one.servers
        await asyncio.sleep(0.2)
    raise DeadlineExceeded(f"a server to serve version {version}", wait_s)


def versions_table(kept: KeptVersions) -> Table:
    table = Table("version", "kept as", "MB", "effective checksum", "served by", box=None)
    for one in kept.versions:
        target = kept.current if kept.rolled_back_to is None else kept.rolled_back_to
        mark = " (to serve)" if one.policy_version == target else ""
        table.add_row(
            f"{one.policy_version}{mark}",
            "whole" if one.is_whole else f"changes of {one.base_version}",
            f"{one.stored_bytes / 1e6:.2f}",
            one.effective_checksum or "–",
            ", ".join(one.servers),
        )
    return table
