"""`runs compare A B`: two runs side by side, from their folders or from a trainer."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli.progress import number
from services.cli.run import run
from services.client import TandemClient
from services.trainer.report.comparison import (
    PassDifference,
    RunComparison,
    RunSide,
    compare_runs,
    read_side,
    side_of,
)
from services.trainer.report.events import EVENTS_FILE, RunEvents
from shared.messages import Event

runs = typer.Typer(help="Look at runs.", no_args_is_help=True)


@runs.callback()
def several() -> None:
    """Look at runs."""


@runs.command()
def compare(
    a: Annotated[str, typer.Argument(help="A run's folder, or a job's id.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    page: Annotated[
        Path | None, typer.Option(help="Also write a page: one HTML file with its figures.")
    ] = None,
    trainer: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_TRAINER",
            help="Asked for a job whose folder is not here.",
            metavar="URL",
        ),
    ] = "http://127.0.0.1:8700",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """What was set differently, and what came of it: reward, |Δ log p|, pass@k, times."""

    async def command() -> int:
        sides = [await _side(one, runs_dir, trainer) for one in (a, b)]
        found = compare_runs(*sides)
        if as_json:
            typer.echo(json.dumps(found.document()))
        else:
            _show(found)
        if page is not None:
            await asyncio.to_thread(_write, page, found)
            typer.echo(f"page: {page}", err=True)
        return 0

    run(command())


async def _side(name: str, runs_dir: Path, trainer: str) -> RunSide:
    here = await asyncio.to_thread(_folder, name, runs_dir)
    return await _asked(name, trainer) if here is None else await asyncio.to_thread(read_side, here)


def _folder(name: str, runs_dir: Path) -> Path | None:
    """Where the run is; a folder without events is given, too: reading it says what it lacks."""
    known = [path for path in (Path(name), runs_dir / name) if path.is_dir()]
    with_events = [path for path in known if (path / EVENTS_FILE).is_file()]
    return next(iter(with_events or known), None)


async def _asked(job_id: str, trainer: str) -> RunSide:
    """The run's events so far."""
    async with TandemClient(trainer, patience_s=10) as client:
        until = await client.num_events(job_id)
        events: list[Event] = []
        async with aclosing(client.events(job_id)) as lines:
            async for numbered in lines:
                events.append(numbered.event)
                if numbered.line >= until:
                    break
    return side_of(job_id, RunEvents(events, len(events), 0), {})


def _write(path: Path, found: RunComparison) -> None:
    # Not above: matplotlib costs half a second, which whoever wants no page shall not pay.
    from services.trainer.report.comparison_page import render_comparison

    path.write_text(render_comparison(found), encoding="utf-8")


def _show(found: RunComparison) -> None:
    console = Console()
    console.print(f"A: {found.a.name}\nB: {found.b.name}", highlight=False, soft_wrap=True)
    for title, rows in (("settings", found.settings), ("machines", found.machines)):
        if rows:
            table = _table(title, "A", "B")
            for one in rows:
                table.add_row(one.key, _text(one.a), _text(one.b))
            console.print(table)
    table = _table("", "A", "B")
    for measure in found.measures:
        unit = f" ({measure.unit})" if measure.unit else ""
        table.add_row(f"{measure.name}{unit}", number(measure.a), number(measure.b))
    console.print(table)
    if found.passes:
        console.print(passes_table(found.passes))
    else:
        console.print(found.absence, highlight=False, soft_wrap=True)


def passes_table(passes: list[PassDifference]) -> Table:
    table = _table("step", "", "A", "B", "B − A", "95 %, paired", "p")
    for one in passes:
        paired = f"[{one.low:+.3f}, {one.high:+.3f}]" if one.is_paired else "other problems"
        p_value = number(one.p_value) if one.is_paired else "–"
        mark = " *" if one.is_significant else ""
        table.add_row(
            str(one.step), f"pass@{one.k}", f"{one.a:.3f}", f"{one.b:.3f}",
            f"{one.difference:+.3f}{mark}", paired.replace("[", r"\["), p_value,
        )  # fmt: skip
    return table


def _table(*head: str) -> Table:
    return Table(*head, box=None, header_style="dim")


def _text(value: Any) -> str:
    return str(value).replace("[", r"\[")
