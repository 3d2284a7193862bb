"""`plan`: memory and traffic of a layout before anybody rents a node; arithmetic, no torch."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from services.cli.document import in_project, read_job
from services.cli.plan_tables import show_plan
from services.cli.run import run
from shared.errors import ConfigInvalid
from shared.job import Job, expand_path
from shared.models.deepseek_v4.architecture import Architecture
from shared.parallel import Layout
from shared.planner.advice import best_layout, fitting_layouts, smallest_change
from shared.planner.plan import Plan, plan_setup
from shared.planner.setup import GB, Machine, Setup
from shared.refusals import fault

MODELS_DIR = Path(__file__).parents[2] / "configs" / "models"
MAX_ALTERNATIVES = 8
_SIZES = {
    "TP": "tensor",
    "PP": "pipeline",
    "CP": "context",
    "EP": "expert",
    "ETP": "expert_tensor",
    "FIRST": "first_stage_layers",
    "LAST": "last_stage_layers",
}


def plan(
    model: Annotated[
        str | None,
        typer.Option(help="A release's directory or config.json, or a name of configs/models."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the actor.", min=1, max=65536)] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Of one GPU, in 10^9 bytes.", min=1)
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="Of one node, in 10^9 bytes.", min=1)
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, max=64)] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Such as TP1/PP4/EP4/LAST10; left out, the planner chooses one."),
    ] = None,
    job: Annotated[Path | None, typer.Option(help="Take everything else from this job.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a value of the job.")
    ] = None,
    recompute: Annotated[Literal["none", "selective", "full"] | None, typer.Option()] = None,
    offload: Annotated[
        float | None, typer.Option(help="Share of the optimiser state on hosts.", min=0, max=1)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Token budget of one GPU's micro-batch.", min=1)
    ] = None,
    background_saves: Annotated[
        bool | None, typer.Option(help="Host memory for checkpoints that are written meanwhile.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Plan an actor: what each GPU and host must hold, what is sent, what would make it fit.

    Exit code 0 when it fits, 1 when it does not.
    """

    async def command() -> int:
        setup, arch, machine = _asked(model, job, changes or [], gpus, gpus_per_node)
        machine = replace(machine, gpu_bytes=_bytes(gpu_memory), host_bytes=_bytes(host_memory))
        given: dict[str, Any] = {
            "recompute": recompute,
            "offload": offload,
            "max_tokens": tokens,
            "background_saves": background_saves,
        }
        setup = replace(setup, **{key: value for key, value in given.items() if value is not None})
        if tokens is not None:
            setup = replace(setup, sample_tokens=min(setup.sample_tokens, tokens))
        found, others = _planned(arch, setup, machine, layout, chosen=layout is not None or job)
        _print(arch, found, others, Console(), as_json=as_json)
        return 0 if found.fits else 1

    run(command())


def _asked(
    model: str | None,
    job_file: Path | None,
    changes: list[str],
    gpus: int | None,
    gpus_per_node: int | None,
) -> tuple[Setup, Architecture, Machine]:
    """Setup and machine as the job says, or the defaults; memory is not known yet."""
    setup, per_node = Setup(), gpus_per_node or 8
    if job_file is not None:
        try:
            job = Job.model_validate(read_job(job_file, changes))
        except ValueError as err:
            raise ConfigInvalid(f"{job_file}: {fault(err)}.") from err
        setup = Setup.of(job)
        per_node = gpus_per_node or job.cluster.gpus_per_node
        model = model or job.model.rollout_checkpoint
    if model is None:
        raise ConfigInvalid("Give --model, or a --job that names one.")
    if gpus is not None and gpus != setup.layout.world:
        setup = replace(setup, layout=Layout(world=gpus))
    return setup, _architecture(model), Machine(gpus_per_node=per_node)


def _architecture(model: str) -> Architecture:
    named = MODELS_DIR / f"{model}.json"
    try:
        return Architecture.load(named if named.is_file() else in_project(expand_path(model)))
    except OSError as err:
        known = ", ".join(sorted(path.stem for path in MODELS_DIR.glob("*.json")))
        raise ConfigInvalid(f"--model {model}: {err.strerror}; known names are {known}.") from err
    except ValueError as err:
        raise ConfigInvalid(f"--model {model}: {err}.") from err


def _planned(
    arch: Architecture, setup: Setup, machine: Machine, layout: str | None, *, chosen: object
) -> tuple[Plan, list[Plan]]:
    """The plan that was asked for, and all that fit, best first."""
    others = fitting_layouts(arch, setup, machine)
    if layout is not None:
        setup = replace(setup, layout=read_layout(layout, setup.layout.world))
    elif not chosen and others:
        best = best_layout(arch, setup, machine)
        assert best is not None
        return best, others
    return plan_setup(arch, setup, machine), others


def read_layout(text: str, world: int) -> Layout:
    """`TP1/PP4/EP4/LAST10` on `world` ranks; a DP part is checked."""
    sizes: dict[str, Any] = {}
    for part in filter(None, re.split(r"[/, ]+", text.upper())):
        match = re.fullmatch(r"([A-Z]+)(\d+)", part)
        if match is None or match[1] not in (*_SIZES, "DP"):
            raise ConfigInvalid(f"--layout {text}: {part} is none of {', '.join(_SIZES)} + size.")
        sizes[_SIZES.get(match[1], "data")] = int(match[2])
    data = sizes.pop("data", None)
    try:
        found = Layout(world=world, **sizes)
    except ValueError as err:
        raise ConfigInvalid(f"--layout {text}: {err}.") from err
    if data not in (None, found.data):
        raise ConfigInvalid(f"--layout {text}: {world} ranks leave DP{found.data}.")
    return found


def _print(
    arch: Architecture, found: Plan, others: list[Plan], console: Console, *, as_json: bool
) -> None:
    advice = None if found.fits else smallest_change(arch, found)
    if not as_json:
        show_plan(console, arch, found, advice, others[:MAX_ALTERNATIVES])
        return
    document = {
        **asdict(found),
        "fits": found.fits,
        "headroom_bytes": found.headroom_bytes,
        "host_bytes": found.host_bytes if found.stages else [],
        "smallest_change": advice.changes if advice else None,
    }
    for stage, shown in zip(found.stages, document["stages"], strict=True):
        shown["layers"] = [stage.layers.start, stage.layers.stop]
        shown["memory"]["total"] = stage.memory.total
        shown["parameters"]["total"] = stage.parameters.total
    typer.echo(json.dumps(document))


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * GB)
