"""The plan for terminals. Sizes are 10^9 bytes."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.advice import Advice
from shared.planner.plan import Plan
from shared.planner.speed import step_seconds

_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "buffers")
_HOST_PARTS = ("experts", "dense", "gradients", "reference", "checkpoint")


def show_plan(
    console: Console,
    arch: Architecture,
    found: Plan,
    advice: Advice | None,
    others: Sequence[Plan],
) -> None:
    for sentence in _opening(found):
        console.print(sentence, highlight=False, soft_wrap=True)
    if found.stages:
        console.print(_stages(found))
        if any(found.host_bytes):
            console.print(_hosts(found))
        if found.traffic:
            console.print(_traffic(found))
    for sentence in _verdict(found, advice):
        console.print(sentence, highlight=False, soft_wrap=True)
    if others:
        console.print(_others(arch, found, others))


def _opening(found: Plan) -> Iterator[str]:
    setup, machine = found.setup, found.machine
    gpu = "" if machine.gpu_bytes is None else f" of {_gb(machine.gpu_bytes)} GB"
    host = "" if machine.host_bytes is None else f", hosts of {_gb(machine.host_bytes)} GB"
    yield (
        f"{setup.layout} on {setup.layout.world} GPUs{gpu}, {machine.gpus_per_node} a node{host}"
    )
    micro = setup.micro_batch
    yield (
        f"{setup.dtype}, recompute {setup.recompute}, {setup.offload:.0%} of the optimiser state "
        f"on hosts; {setup.micro_batches} micro-batches of {micro.rows} x {micro.length} tokens"
    )


def _stages(found: Plan) -> Table:
    table = Table(title="Each GPU of a pipeline stage (GB)", box=None, title_justify="left")
    table.add_column("stage")
    for stage in found.stages:
        table.add_column(str(stage.number), justify="right", no_wrap=True)
    usable = found.machine.usable_gpu_bytes
    rows = {
        "layers": [f"{stage.layers.start}–{stage.layers.stop - 1}" for stage in found.stages],
        "parameters, 10^9": [f"{stage.parameters.total / 1e9:.2f}" for stage in found.stages],
        **{part: [_gb(getattr(s.memory, part)) for s in found.stages] for part in _PARTS},
        "total": [_gb(stage.memory.total) for stage in found.stages],
    }
    if usable is not None:
        rows["to spare"] = [_gb(usable - stage.memory.total) for stage in found.stages]
    for name, values in rows.items():
        table.add_row(name, *values, style="bold" if name == "total" else None)
    logits = found.stages[-1].memory.logits
    table.caption = f"working: the larger of one block's backward pass and logits ({_gb(logits)})"
    table.caption_justify = "left"
    return table


def _hosts(found: Plan) -> Table:
    """What every host has for each of its GPUs, and in all."""
    table = Table(title="Each host (GB); parts are each GPU's", box=None, title_justify="left")
    parts = [name for name in _HOST_PARTS if any(getattr(s.host, name) for s in found.stages)]
    for name in ("node", *parts, "total"):
        table.add_column(name, justify="right")
    layout, per_node = found.setup.layout, found.machine.gpus_per_node
    for node, total in enumerate(found.host_bytes):
        ranks = range(node * per_node, min((node + 1) * per_node, layout.world))
        hosts = [found.stages[stage].host for stage in sorted({*map(layout.stage_of, ranks)})]
        sizes = [" / ".join(_gb(getattr(host, name)) for host in hosts) for name in parts]
        table.add_row(str(node), *sizes, _gb(total))
    return table


def _traffic(found: Plan) -> Table:
    table = Table(title="Sent by one GPU in a step (GB)", box=None, title_justify="left")
    for name in ("stage", "collective"):
        table.add_column(name, no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    for stage in found.stages:
        table.add_column(str(stage.number), justify="right", no_wrap=True)
    sent = {(one.what, one.stage): one for one in found.traffic}
    for what in dict.fromkeys(one.what for one in found.traffic):
        row = [sent.get((what, stage.number)) for stage in found.stages]
        most = max((one for one in row if one is not None), key=lambda one: one.calls)
        sizes = ["–" if one is None else _gb(one.num_bytes) for one in row]
        table.add_row(what, f"{most.operation} x{most.ranks}", str(most.calls), *sizes)
    return table


def _verdict(found: Plan, advice: Advice | None) -> Iterator[str]:
    for problem in found.problems:
        yield f"[red]does not fit[/red]: {problem}"
    if found.fits:
        spare = found.headroom_bytes
        stage = found.fullest.number
        yield (
            f"the fullest GPU is one of stage {stage}; whether it fits is said with --gpu-memory GB"
            if spare is None
            else f"[green]fits[/green]: {_gb(spare)} GB to spare on the fullest GPU (stage {stage})"
        )
        if found.setup.offload:
            experts = max(stage.host.experts for stage in found.stages)
            yield (
                f"the offloaded optimiser of each GPU's experts takes {_gb(experts)} GB of its "
                f"host; the fullest node needs {_gb(max(found.host_bytes))} GB"
            )
    elif advice is None:
        yield "no change that the planner knows would make it fit"
    else:
        changes = ", ".join(f"{key} = {value}" for key, value in advice.changes.items())
        yield f"smallest change that fits: {changes}"


def _others(arch: Architecture, found: Plan, others: Sequence[Plan]) -> Table:
    table = Table(title="Layouts that fit, by a rough time of a step", box=None)
    table.title_justify = "left"
    for name in ("layout", "time", "to spare, GB", "sent, GB", "fullest host, GB"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    first = step_seconds(arch, others[0])
    for one in others:
        chosen = " *" if one.setup.layout == found.setup.layout else ""
        spare = "?" if one.headroom_bytes is None else _gb(one.headroom_bytes)
        time = f"{step_seconds(arch, one) / first:.2f}"
        sent, host = _gb(one.sent_bytes), _gb(max(one.host_bytes))
        table.add_row(f"{one.setup.layout}{chosen}", time, spare, sent, host)
    return table


def _gb(num_bytes: float) -> str:
    size = num_bytes / 1e9
    if abs(size) >= 1000:
        return f"{size:,.0f}"
    return f"{size:,.1f}" if abs(size) >= 1 or size == 0 else f"{size:.3f}"
