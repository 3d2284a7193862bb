"""`replay RUN`: train what a run recorded once more, without samplers."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.document import change_document
from services.cli.run import run
from services.cli.watch import follow_job
from services.client import TandemClient
from services.trainer.recording import RECORDING_FILE
from shared.errors import ConfigInvalid
from shared.job_algorithm import beyond_its_name
from shared.refusals import fault

JOB_FILE = "job.json"


def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that was recorded.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a value of the job.", metavar="KEY=VAL"),
    ] = None,
    trainer: Annotated[
        str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
    ] = "http://127.0.0.1:8700",
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
) -> None:
    """Train the recorded groups of a run again: the same job and seed give the same weights."""

    async def command() -> int:
        document = replay_document(run_dir, changes or [])
        async with TandemClient(trainer, patience_s=10) as client:
            submitted = await client.submit(document)
        return await follow_job(trainer, submitted.job_id, as_json=as_json)

    run(command())


def replay_document(run_dir: Path, changes: list[str]) -> dict[str, Any]:
    """The recorded job as a train-only one. `ConfigInvalid` says what is not there."""
    path = run_dir / JOB_FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{run_dir} is no run folder: {fault(err)}.") from err
    if not (run_dir / RECORDING_FILE).is_file():
        raise ConfigInvalid(
            f"{run_dir} was not recorded: it has no {RECORDING_FILE}. Run the job again with "
            "`--record` (of `submit` and `demo`; `record = true` in a job) and replay that run."
        )
    document |= {"mode": "train_only", "recording": str(run_dir.resolve()), "record": False}
    document |= {"eval": None, "name": f"{document['name'][:34]}-replay"}
    document.pop("deterministic", None)  # it follows from what `changes` say of the lag
    document["algorithm"] = beyond_its_name(document.get("algorithm") or {})
    change_document(document, changes)
    return document
