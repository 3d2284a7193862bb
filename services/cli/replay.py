"""`replay RUN`: train what a run recorded once more, without samplers."""

import asyncio
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
from shared.job import JOB_FILE
from shared.job_algorithm import beyond_its_name
from shared.refusals import fault
from shared.weights.manifest import MANIFEST_FILE, Manifest

_FIRST = "v00000000"


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
        code = await follow_job(trainer, submitted.job_id, as_json=as_json)
        if code == 0:
            again = run_dir.resolve().parent / submitted.job_id
            typer.echo(await asyncio.to_thread(same_weights, run_dir, again), err=as_json)
        return code

    run(command())


def same_weights(run_dir: Path, again: Path) -> str:
    """Whether the newest version that both runs still have is the same, tensor by tensor."""
    both = _versions(run_dir) & _versions(again)
    if not both:
        return (
            f"Weights are not compared: {run_dir} and {again} have no published version in common."
        )
    name = max(both)
    left, right = _checksums(run_dir, name), _checksums(again, name)
    differing = [one for one in left | right if left.get(one) != right.get(one)]
    if not differing:
        return f"Weights {name} are those of {run_dir.name}: all {len(left)} tensors are equal."
    return (
        f"Weights {name} are not those of {run_dir.name}: {len(differing)} of {len(left | right)} "
        f"tensors differ, {sorted(differing)[0]} among them."
    )


def _versions(run_dir: Path) -> set[str]:
    """Names of the kept ones, without the first weights, which nobody trained."""
    found = {path.parent.name for path in (run_dir / "weights").glob(f"v*/{MANIFEST_FILE}")}
    return found - {_FIRST}


def _checksums(run_dir: Path, version: str) -> dict[str, str]:
    path = run_dir / "weights" / version / MANIFEST_FILE
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{path} is no manifest: {fault(err)}.") from err
    return {tensor.name: tensor.checksum for tensor in manifest.tensors}


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
