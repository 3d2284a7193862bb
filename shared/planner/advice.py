"""The smallest change that would make a plan fit, and the layouts that a model can have.

Smallest: fewest fields, and among those the ones that cost a run least: computing activations
again, then moving optimiser state, then saving in the foreground, then smaller micro-batches, then
other groups, then more nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from shared.models.deepseek_v4.architecture import Architecture
from shared.parallel import Layout, balanced_last_stage, divisors
from shared.planner.plan import Plan, plan_setup
from shared.planner.setup import Machine, Setup
from shared.planner.speed import step_seconds

MAX_TENSOR = 8
OFFLOADS = (0.25, 0.5, 0.75, 1.0)
MAX_TIMES_NODES = 16
MARGIN = 0.15
# What saves memory of GPUs without another layout.
SAVING: dict[str, Any] = {"recompute": "full", "recomputed_blocks": None, "offload": 1.0}


@dataclass(frozen=True, slots=True)
class Advice:
    """Fields of the job with their new values, and the plan that follows from them."""

    changes: dict[str, str]
    plan: Plan


def smallest_change(arch: Architecture, found: Plan) -> Advice | None:
    """None where nothing that is known to the planner helps; `found` does not fit."""
    levers = list(_levers(arch, found.setup, found.machine))
    for number in range(1, len(levers) + 1):
        for chosen in combinations(levers, number):
            for steps in product(*chosen):
                if advice := _tried(arch, found, steps):
                    return advice
    return _more_nodes(arch, found)


def layouts(arch: Architecture, world: int, *, gpus_per_node: int) -> list[Layout]:
    """Every layout of this model on `world` ranks without context and expert-tensor parallelism;
    the stages are as even as they can be."""
    found: list[Layout] = []
    for tensor, pipeline in product(divisors(world), divisors(world)):
        if world % (tensor * pipeline) or tensor > min(MAX_TENSOR, gpus_per_node):
            continue
        last = balanced_last_stage(arch.num_hidden_layers, pipeline)
        if arch.num_hidden_layers % pipeline and last is None:
            continue
        sizes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "last_stage_layers": last}
        found += [
            Layout(world=world, expert=expert, **sizes)
            for expert in divisors(world // pipeline)
            if arch.n_routed_experts % expert == 0
        ]
    return found


def best_layout(arch: Architecture, setup: Setup, machine: Machine) -> Plan | None:
    """Of all layouts that fit with `MARGIN` to spare, the one with the shortest step."""
    plans = fitting_layouts(arch, setup, machine)
    roomy = [one for one in plans if _is_roomy(one)]
    return next(iter(roomy or plans), None)


def fitting_layouts(arch: Architecture, setup: Setup, machine: Machine) -> list[Plan]:
    """Plans of all layouts of the same GPUs that fit, the shortest step first."""
    plans = [
        plan_setup(arch, replace(setup, layout=layout), machine)
        for layout in layouts(arch, setup.layout.world, gpus_per_node=machine.gpus_per_node)
    ]
    return sorted((one for one in plans if one.fits), key=lambda one: step_seconds(arch, one))


def _is_roomy(found: Plan) -> bool:
    """Whether uneven routing, which the plan does not foresee, would still fit."""
    room, whole = found.headroom_bytes, found.machine.gpu_bytes
    return room is None or whole is None or room >= MARGIN * whole


_Step = tuple[str, str, dict[str, Any]]


def _levers(arch: Architecture, setup: Setup, machine: Machine) -> Iterator[list[_Step]]:
    """Each lever's other settings, mildest first."""
    modes = ("none", "selective", "full")
    stronger = modes[modes.index(setup.recompute) + 1 :]
    if setup.recomputed_blocks is not None:
        yield [("actor.recompute.num_blocks", "all", {"recomputed_blocks": None})]
    if stronger:
        yield [("actor.recompute.mode", mode, {"recompute": mode}) for mode in stronger]
    more = [share for share in OFFLOADS if share > setup.offload]
    less = [share for share in reversed(OFFLOADS) if share < setup.offload]
    key = "actor.optimizer.offload.fraction"
    yield [(key, f"{share:g}", {"offload": share}) for share in (*more, *less)]
    if setup.background_saves:
        yield [("checkpoint.background", "false", {"background_saves": False})]
    if setup.max_tokens > setup.row_tokens:
        tokens = setup.row_tokens
        yield [("actor.max_tokens_per_gpu", str(tokens), {"max_tokens": tokens})]
    others = layouts(arch, setup.layout.world, gpus_per_node=machine.gpus_per_node)
    others = [one for one in others if one != setup.layout]
    if others:
        yield [
            ("actor.parallel", str(one), {"layout": one})
            for one in sorted(others, key=lambda one: _distance(one, setup.layout))
        ]


def _distance(one: Layout, other: Layout) -> tuple[int, int]:
    """Groups that differ, and by how much they grow in all."""
    names = ("tensor", "pipeline", "expert", "context", "expert_tensor")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return sum(a != b for a, b in pairs), sum(abs(a - b) for a, b in pairs)


def _tried(arch: Architecture, found: Plan, steps: Sequence[_Step]) -> Advice | None:
    changes: dict[str, Any] = {}
    for _, _, fields in steps:
        changes |= fields
    tried = plan_setup(arch, replace(found.setup, **changes), found.machine)
    return Advice({key: value for key, value, _ in steps}, tried) if tried.fits else None


def _more_nodes(arch: Architecture, found: Plan) -> Advice | None:
    """The fewest GPUs more that are enough, with as little else changed as that allows."""
    strongest = SAVING | {"background_saves": False}
    milder: tuple[dict[str, Any], ...] = ({}, SAVING)
    for world in _larger(found.setup.layout.world, found.machine.gpus_per_node):
        bare = replace(found.setup, layout=Layout(world=world))
        enough = best_layout(arch, replace(bare, **strongest), found.machine)
        if enough is None:
            continue
        tried = (best_layout(arch, replace(bare, **changes), found.machine) for changes in milder)
        best = next((one for one in tried if one is not None), enough)
        return Advice({"GPUs": str(world), **_changed(found.setup, best.setup)}, best)
    return None


def _larger(world: int, per_node: int) -> Iterator[int]:
    """GPU by GPU on the first node, then node by node."""
    yield from range(world + 1, per_node)
    nodes = world // per_node
    yield from (per_node * more for more in range(nodes + 1, max(nodes, 1) * MAX_TIMES_NODES + 1))


def _changed(before: Setup, after: Setup) -> dict[str, str]:
    """Fields of the job that differ, with their new values."""
    blocks = after.recomputed_blocks
    fields = {
        "actor.parallel": (before.layout, after.layout, str(after.layout)),
        "actor.recompute.mode": (before.recompute, after.recompute, after.recompute),
        "actor.recompute.num_blocks": (before.recomputed_blocks, blocks, str(blocks or "all")),
        "actor.optimizer.offload.fraction": (before.offload, after.offload, f"{after.offload:g}"),
        "checkpoint.background": (before.background_saves, after.background_saves, "false"),
    }
    return {key: shown for key, (old, new, shown) in fields.items() if old != new}
