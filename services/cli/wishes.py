"""`cancel`, `pause`, `resume`: each tells what was asked for and which state follows.

A running job answers a wish between two things that it does, so its state is the old one meanwhile.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from services.cli.document import change_document
from services.cli.run import run
from services.client import Command, TandemClient
from shared.job_answers import JobStatus

_FOLLOWS = {
    "cancel": "cancelled within seconds; what it has trained stays, and its report is written",
    "pause": "paused once the step in progress is taken; `resume` continues it",
}

JobId = Annotated[str, typer.Argument(help="As `submit` and `status` print it.")]
Trainer = Annotated[
    str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Spread it otherwise: actor.parallel.tensor=2.", metavar="KEY=VAL"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

LOCAL_TRAINER = "http://127.0.0.1:8700"


def cancel(job_id: JobId, trainer: Trainer = LOCAL_TRAINER, as_json: Json = False) -> None:
    """End a job for good: it becomes cancelled, and keeps its run folder."""
    _ask("cancel", job_id, trainer, as_json=as_json)


def pause(job_id: JobId, trainer: Trainer = LOCAL_TRAINER, as_json: Json = False) -> None:
    """Let a job take the step in progress and then wait; `resume` continues it."""
    _ask("pause", job_id, trainer, as_json=as_json)


def resume(
    job_id: JobId,
    change: Changes = None,
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Json = False,
) -> None:
    """Continue a paused or failed job from where it stopped, on another layout if it is asked."""
    changes: dict[str, Any] = {}
    change_document(changes, change or [])
    _ask("resume", job_id, trainer, as_json=as_json, changes=changes)


def _ask(
    wish: Command,
    job_id: str,
    trainer: str,
    *,
    as_json: bool,
    changes: Mapping[str, Any] | None = None,
) -> None:
    async def command() -> int:
        async with TandemClient(trainer, patience_s=10) as client:
            found = await client.command(job_id, wish, changes=changes)
        typer.echo(found.model_dump_json() if as_json else told(wish, found))
        return 0

    run(command())


def told(wish: Command, found: JobStatus) -> str:
    """What a person reads: never the old state alone."""
    if wish != "resume" and found.state == "running":
        now = found.doing or "running"
        return f"asked {found.job_id} to {wish}: it is {now}, and will be {_FOLLOWS[wish]}"
    if wish == "resume" and found.state == "queued":
        return f"{found.job_id} is queued: it continues after step {found.step} when its turn comes"
    return f"{found.job_id} is {found.state}"
