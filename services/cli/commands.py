"""The commands: up and demo start processes here; the others speak REST to any trainer."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.attribute import attribute
from services.cli.convert import convert
from services.cli.demo import DemoOptions, run_demo
from services.cli.doctor import doctor
from services.cli.document import read_job
from services.cli.evaluate import evaluate
from services.cli.explain import explain
from services.cli.parity import parity
from services.cli.plan import plan
from services.cli.profile import profile
from services.cli.regrade import regrade
from services.cli.replay import replay
from services.cli.run import log_to, run
from services.cli.runs import runs
from services.cli.stack import (
    MAX_REWARD,
    MAX_ROLLOUT,
    check_stack,
    choose_ports,
    stack_programs,
    tell_restarts,
)
from services.cli.tables import job_table, jobs_table
from services.cli.watch import follow_job
from services.cli.weights import weights
from services.cli.wishes import cancel, pause, resume
from services.client import TandemClient
from shared.local_stack import running

app = typer.Typer(
    help="Tandem: RL post-training in which the sampled and the trained policy stay the same.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Trainer = Annotated[
    str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a value of the job: section.key=value.", metavar="KEY=VAL"),
]
PortsFrom = Annotated[
    int | None,
    typer.Option(
        help="First of the ports to use (trainer +0, rollout +10, reward +30, evaluator +40, "
        "broker +50); 0 takes any free ones. Default: 8700 and so on, broker 16379.",
        min=0,
        max=65000,
    ),
]
Rollout = Annotated[int, typer.Option(help="Rollout replicas.", min=1, max=MAX_ROLLOUT)]
Reward = Annotated[int, typer.Option(help="Reward replicas.", min=1, max=MAX_REWARD)]
Record = Annotated[
    bool, typer.Option("--record", help="Keep every group of the run, for `replay`.")
]
RunsDir = Annotated[Path, typer.Option(help="Where runs are kept.")]

LOCAL_TRAINER = "http://127.0.0.1:8700"


@app.command()
def up(
    rollout: Rollout = 2,
    reward: Reward = 1,
    data_dir: RunsDir = Path("runs"),
    ports_from: PortsFrom = None,
    as_json: Json = False,
) -> None:
    """Start broker, trainer, rollout, reward and evaluator here; Ctrl-C drains them."""
    ports = choose_ports(num_rollout=rollout, num_reward=reward, base=ports_from)

    async def command() -> int:
        check_stack(ports)
        console = Console(stderr=as_json)
        stack_dir = data_dir / "_stack" / "up"  # the same each time: the broker keeps its data
        with log_to(stack_dir / "stack.log"):
            programs = stack_programs(ports, data_dir=stack_dir, runs_dir=data_dir)
            console.print(f"starting; logs: {stack_dir}", soft_wrap=True)
            async with running(programs, log_dir=stack_dir) as stack:
                for name, port in ports.by_name().items():
                    console.print(f"{name:<12} ready  port {port}  pid {stack.pids[name]}")
                console.print(f"dashboard: {ports.trainer_url}/   Ctrl-C stops all")
                if as_json:
                    typer.echo(json.dumps({"trainer": ports.trainer_url, "ports": ports.by_name()}))
                await tell_restarts(stack, console)
        return 0

    run(command(), drains=True)


@app.command()
def demo(
    job: Annotated[Path, typer.Option(help="The job to run.")] = Path("configs/demo.toml"),
    seed: Annotated[int | None, typer.Option(help="Replaces the job's seed.", min=0)] = None,
    steps: Annotated[int | None, typer.Option(help="Replaces the job's steps.", min=1)] = None,
    rollout: Rollout = 2,
    reward: Reward = 1,
    changes: Changes = None,
    record: Record = False,
    runs_dir: RunsDir = Path("runs"),
    ports_from: PortsFrom = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; the rest goes to stderr.")
    ] = False,
) -> None:
    """Start everything, train a job, show it live, compare before and after, stop everything."""
    given = {"seed": seed, "steps": steps, "record": "true" if record else None}
    options = DemoOptions(
        job=job,
        changes=[*(changes or []), *(f"{k}={v}" for k, v in given.items() if v is not None)],
        ports=choose_ports(num_rollout=rollout, num_reward=reward, base=ports_from),
        runs_dir=runs_dir,
        as_json=as_json,
    )
    run(run_demo(options, Console(stderr=as_json)), drains=True)


@app.command()
def submit(
    job: Annotated[Path, typer.Argument(help="A job document in TOML.")],
    changes: Changes = None,
    record: Record = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow it to its end.")] = False,
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Json = False,
) -> None:
    """Submit a job; wrong keys are refused, each with its value and what is allowed."""

    async def command() -> int:
        document = read_job(job, [*(changes or []), *(["record=true"] if record else [])])
        async with TandemClient(trainer, patience_s=10) as client:
            submitted = await client.submit(document)
        if as_json:
            typer.echo(submitted.model_dump_json())
        else:
            typer.echo(submitted.job_id)
            for warning in submitted.warnings:
                typer.echo(f"warning: {warning}", err=True)
        return await follow_job(trainer, submitted.job_id, as_json=as_json) if watch_it else 0

    run(command())


@app.command()
def status(
    job_id: Annotated[str | None, typer.Argument(help="One job; default: all.")] = None,
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Json = False,
) -> None:
    """Show all jobs, or one."""

    async def command() -> int:
        async with TandemClient(trainer, patience_s=10) as client:
            jobs = [await client.job(job_id)] if job_id else await client.jobs()
        if as_json:
            documents = [found.model_dump() for found in jobs]
            typer.echo(json.dumps(documents[0] if job_id else documents))
        else:
            Console().print(job_table(jobs[0]) if job_id else jobs_table(jobs))
        return 0

    run(command())


@app.command()
def watch(
    job_id: Annotated[str, typer.Argument()],
    trainer: Trainer = LOCAL_TRAINER,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
) -> None:
    """Follow a job until it ends; exit code 0 only when it finished."""
    run(follow_job(trainer, job_id, as_json=as_json))


# `--help` lists them in this order, after those above: what people need first comes first.
app.command()(pause)
app.command()(resume)
app.command()(cancel)
app.command()(doctor)
app.command()(profile)
app.command()(attribute)
app.command()(explain)
app.command()(parity)
app.command("eval")(evaluate)
app.command()(regrade)
app.command()(replay)
app.command()(convert)
app.command()(plan)
app.add_typer(runs, name="runs")
app.add_typer(weights, name="weights")
