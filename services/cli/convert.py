"""`convert`: starts the converter, which has torch, and shows what it tells."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from services.cli.run import run
from shared.weights.conversion import (
    ConversionEvent,
    ConversionTarget,
    Failed,
    Finished,
    Planned,
    Progressed,
    read_event,
)

# Freed memory is used again instead of being given back: half the time of a conversion is otherwise
# spent on pages that the kernel clears.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
_MAX_LINE_BYTES = 1 << 20
_MAX_LAST_WORDS = 2000  # characters of a converter's own log that are shown when it died


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A release, transformers' safetensors, a torch_dist checkpoint of the actor, or "
            "a published version (runs/JOB/weights/vN)."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The directory to make; it appears whole.")],
    to: Annotated[
        ConversionTarget,
        typer.Option(
            help="A release in bf16, fp8, fp4 or fp32; transformers' names; Megatron torch_dist."
        ),
    ],
    like: Annotated[
        Path | None,
        typer.Option(help="A release of the same model, for a source without config.json."),
    ] = None,
    fp32: Annotated[
        bool, typer.Option("--fp32", help="FP32 instead of BF16 in transformers and torch_dist.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at the target, at the end.")
    ] = False,
    max_shard_mb: Annotated[int, typer.Option(help="Size of a file, in 10^6 bytes.", min=1)] = 4000,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
) -> None:
    """Convert a checkpoint; stopped at any moment, the same command goes on where it was."""
    arguments = [str(source), str(target), "--to", to]
    arguments += ["--like", str(like)] if like else []
    arguments += ["--fp32"] * fp32 + ["--overwrite"] * overwrite
    arguments += ["--max-shard-bytes", str(max_shard_mb * 1_000_000)]
    run(_convert(arguments, Console(stderr=as_json), as_json=as_json))


async def _convert(arguments: list[str], console: Console, *, as_json: bool) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.trainer.convert", *arguments),
        *("--parent", str(os.getpid())),
        stdout=PIPE,
        stderr=PIPE,
        limit=_MAX_LINE_BYTES,
        env={**_MEMORY, **os.environ},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last_words = asyncio.create_task(process.stderr.read())
    try:
        events = _events(process.stdout)
        ended = await (_print(events) if as_json else _show(events, console))
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()  # finished shards are on the disk
            await process.wait()
        log = (await last_words).decode(errors="replace").strip()
    if not ended:
        console.print(log[-_MAX_LAST_WORDS:], highlight=False, markup=False)
        console.print(f"The converter ended with code {code}: run it again to go on.")
    return code or (0 if ended else 1)


async def _events(stdout: asyncio.StreamReader) -> AsyncIterator[ConversionEvent]:
    async for line in stdout:
        try:
            yield read_event(line)
        except ValidationError as err:
            raise RuntimeError(f"the converter wrote {line[:200]!r}, which is no event") from err


async def _print(events: AsyncIterator[ConversionEvent]) -> bool:
    """As `_show`, for machines."""
    ended = False
    async for event in events:
        ended = ended or isinstance(event, Finished | Failed)
        typer.echo(event.model_dump_json())
    return ended


async def _show(events: AsyncIterator[ConversionEvent], console: Console) -> bool:
    """True when the converter said how it ended."""
    ended = False
    with _bar(console) as bar:
        task = bar.add_task("reading headers", total=None)
        async for event in events:
            ended = ended or isinstance(event, Finished | Failed)
            _apply(event, bar, task)
    return ended


def _apply(event: ConversionEvent, bar: Progress, task: TaskID) -> None:
    match event:
        case Planned():
            kept = (
                f", {event.kept_bytes / 1e9:.2f} GB of it done before" if event.kept_bytes else ""
            )
            bar.console.print(
                f"{event.source}: {event.num_tensors} tensors, {event.total_bytes / 1e9:.2f} GB in "
                f"{event.num_shards} files{kept}",
                highlight=False,
            )
            for note in event.notes:
                bar.console.print(note, highlight=False)
            bar.update(
                task, total=event.total_bytes, completed=event.kept_bytes, description="converting"
            )
        case Progressed():
            bar.update(task, completed=event.done_bytes, description=event.tensor)
        case Finished():
            bar.update(task, visible=False)
            rate = event.num_bytes / 1e9 / event.seconds if event.seconds else 0.0
            how = "is there already" if event.already_there else f"{event.seconds:.1f} s"
            speed = "" if event.already_there else f", {rate:.2f} GB/s"
            bar.console.print(f"{event.path}  {how}{speed}", highlight=False, soft_wrap=True)
        case Failed():
            bar.update(task, visible=False)
            sys.stderr.write(f"{event.error}\n")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
