"""`demo`: the whole system on this machine, from nothing to a report.

    checks ─> broker, services ready ─> submit over REST ─> watch ─> table, report ─> stop all

The job's events are all that is shown, so a service that dies is seen as such, restarted by the
stack, and the watch goes on.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from services.cli.document import check_variables, read_job
from services.cli.progress import JobView
from services.cli.run import log_to
from services.cli.stack import Ports, check_stack, stack_programs
from services.cli.tables import before_after_table, verdict
from services.cli.watch import watch_job
from services.client import TandemClient
from shared.errors import DeadlineExceeded, HttpFailed, StackFailed
from shared.local_stack import Stack, running
from shared.tasks import end

MAX_RESTARTS = 8  # of one program: it comes up each time, yet the job cannot go on like that
REPORT_DEADLINE_S = 20.0  # it is written before the job's end is told
PATIENCE_S = (
    120.0  # a trainer that died is back within seconds, on a loaded machine within a minute
)

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class DemoOptions:
    job: Path
    changes: list[str]
    ports: Ports
    runs_dir: Path
    as_json: bool = False


async def run_demo(options: DemoOptions, console: Console) -> int:
    """0 only when the job finished and its report is written."""
    document = read_job(options.job, options.changes)
    check_variables(document)
    check_stack(options.ports)
    stack_dir = options.runs_dir / "_stack" / time.strftime("%Y%m%d-%H%M%S")
    with log_to(stack_dir / "stack.log"):
        console.print(
            f"starting the broker and the services; their logs: {stack_dir}", soft_wrap=True
        )
        programs = stack_programs(options.ports, data_dir=stack_dir, runs_dir=options.runs_dir)
        async with running(programs, log_dir=stack_dir) as stack:
            console.print(f"all are ready; dashboard: {options.ports.trainer_url}/")
            guard = asyncio.create_task(_fail_on_restarts(stack))
            job = asyncio.create_task(_run_job(options, document, stack, console))
            try:
                await asyncio.wait({job, guard}, return_when=asyncio.FIRST_COMPLETED)
                if guard.done():
                    await guard
                return await job
            finally:
                await end(job)
                await end(guard)
                console.print("stopping the services")


async def _run_job(
    options: DemoOptions, document: Mapping[str, Any], stack: Stack, console: Console
) -> int:
    async with TandemClient(options.ports.trainer_url, patience_s=PATIENCE_S) as client:
        submitted = await client.submit(document)
        console.print(f"submitted {submitted.job_id}")
        for warning in submitted.warnings:
            console.print(f"warning: {warning}", style="yellow")

        def notes() -> dict[str, str]:
            restarts = {name: num for name, num in stack.restarts.items() if num}
            told = ", ".join(f"{name} {num}" for name, num in restarts.items())
            rows = {"dashboard": f"{options.ports.trainer_url}/"}
            return rows | ({"restarts": told} if told else {})

        try:
            view = await watch_job(client, submitted.job_id, console, notes=notes)
        except asyncio.CancelledError:
            _tell_left(options.runs_dir / submitted.job_id, console)
            raise
        await _show_end(client, view, options, console)
    return 0 if view.state == "finished" else 1


def _tell_left(run_dir: Path, console: Console) -> None:
    """Of a job that is interrupted: its queue ends with this stack, its folder stays."""
    console.print(
        f"{run_dir.name} did not end; what it did is in {run_dir} (events.jsonl, metrics.jsonl). "
        "A demo is not taken up again: for a job that goes on after a stop, use `tandem up` and "
        "`tandem submit`.",
        soft_wrap=True,
        highlight=False,
    )


async def _show_end(
    client: TandemClient, view: JobView, options: DemoOptions, console: Console
) -> None:
    if view.state != "finished":
        console.print(f"{view.job_id} {view.state}: {view.error or 'no reason given'}", style="red")
    if not view.done and view.state != "finished":
        return  # it never took a step: there is nothing to report
    summary = await _summary(client, view.job_id)
    if options.as_json:
        typer.echo(json.dumps(summary))
    if (table := before_after_table(summary)) is not None:
        console.print(table)
    console.print(verdict(summary), soft_wrap=True)
    run_dir = options.runs_dir / view.job_id
    console.print(f"report:  {run_dir / 'report.html'}", soft_wrap=True)
    console.print(f"numbers: {run_dir / 'summary.json'}", soft_wrap=True)
    for figure in sorted(run_dir.glob("*.png")):
        console.print(f"figure:  {figure}", soft_wrap=True)


async def _summary(client: TandemClient, job_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + REPORT_DEADLINE_S
    while True:
        try:
            return await client.summary(job_id)
        except HttpFailed as err:
            if err.status != 404:
                raise
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"the report of {job_id}", REPORT_DEADLINE_S)
        await asyncio.sleep(_POLL_S)


async def _fail_on_restarts(stack: Stack) -> None:
    while True:
        for name, num in stack.restarts.items():
            if num > MAX_RESTARTS:
                raise StackFailed(
                    f"{name} keeps dying ({num} restarts); its log: {stack.log_path(name)}"
                )
        await asyncio.sleep(_POLL_S)
