"""Bytes on each rank of a pipeline stage, by what they are for."""

from dataclasses import dataclass, fields
from typing import Self

from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.activations import (
    Recompute,
    block_activations,
    head_activations,
    mtp_activations,
    routed_rows,
)
from shared.planner.parameters import FP32_BYTES, Parameters, stage_parameters
from shared.planner.setup import Setup

# Megatron's mixed-precision Adam: FP32 master, first and second moment of a BF16 weight; an FP32
# weight is its own master.
MASTER_BYTES = 4
MOMENT_BYTES = 8
# A checkpoint has an FP32 value and both moments of each trained weight.
SAVED_BYTES = 12


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device at the worst moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward passes, of all micro-batches under way."""
    working: int
    """Of one block's backward pass, what it computes again included, or of the logits, or of MTP
    blocks that are trained."""
    logits: int
    """The part of `working` that is the output head's; shown, not added."""
    buffers: int
    """Between stages, to experts on other ranks, rounded copies of weights; at least what the
    weights' own copy takes beyond activations, while a rounded pass is made between steps."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "logits")

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the host for one rank."""

    experts: int
    """Masters and moments of the experts."""
    dense: int
    gradients: int
    """Pinned copies of gradients on their way."""
    reference: int
    """Weights of the reference policy, and the trained ones while it scores."""
    checkpoint: int
    """Copies of weights and states while they are written in the background."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage; every rank of it holds as much."""

    number: int
    layers: range
    parameters: Parameters
    memory: Memory
    host: HostMemory

    @classmethod
    def of(cls, arch: Architecture, setup: Setup, number: int) -> Self:
        layers = setup.layout.stage_layers(arch.num_hidden_layers)[number]
        held = stage_parameters(
            arch,
            setup.layout,
            stage=number,
            freeze_router=setup.freeze_router,
            trains_mtp=setup.trains_mtp,
        )
        return cls(
            number, layers, held, _memory(arch, setup, number, layers, held), _host(held, setup)
        )


def _memory(
    arch: Architecture, setup: Setup, number: int, layers: range, held: Parameters
) -> Memory:
    micro, layout, precision = setup.micro_batch, setup.layout, setup.precision
    blocks = [block_activations(arch, layer, micro, layout, precision) for layer in layers]
    modes = [_recompute(setup, index) for index in range(len(layers))]
    pairs = list(zip(blocks, modes, strict=True))
    streams = micro.tokens * arch.hc_mult * arch.hidden_size * precision.dtype_bytes
    working = max(block.working(mode) for block, mode in pairs) + 2 * streams
    under_way = min(layout.pipeline - number, setup.micro_batches)
    activations = under_way * sum(block.kept(mode) for block, mode in pairs)
    logits = 0
    if number == layout.pipeline - 1:
        head_kept, logits = head_activations(arch, micro, layout, precision)
        activations += head_kept
        working = max(working, _mtp(arch, setup, logits, 2 * streams))
    working = max(working, logits)
    buffers = _buffers(arch, setup, held, streams, number)
    if setup.scores_as_served and not setup.rounds:
        # Between steps, when nothing is kept for a backward pass.
        buffers = max(buffers, held.weight_bytes(precision.dtype_bytes) - activations - working)
    return Memory(
        weights=held.weight_bytes(precision.dtype_bytes),
        gradients=held.trained * FP32_BYTES,
        optimizer=round(sum(_state(held, setup)) * (1 - setup.offload)),
        activations=activations,
        working=working,
        logits=logits,
        buffers=buffers,
    )


def _recompute(setup: Setup, index: int) -> Recompute:
    """Of a stage's block number `index`."""
    limit = setup.recomputed_blocks
    return setup.recompute if limit is None or index < limit else "none"


def _mtp(arch: Architecture, setup: Setup, logits: int, gradients: int) -> int:
    """What trained MTP blocks keep and need: they come last, so all of it is gone again before the
    first of the other blocks has its backward pass."""
    if not setup.trains_mtp:
        return 0
    given = (setup.micro_batch, setup.layout, setup.precision)
    depths = range(arch.num_nextn_predict_layers)
    kept = sum(mtp_activations(arch, depth, *given) for depth in depths)
    block = block_activations(arch, arch.num_hidden_layers, *given)
    return kept + max(block.working("none") + gradients, logits)


def _buffers(arch: Architecture, setup: Setup, held: Parameters, streams: int, number: int) -> int:
    layout, precision = setup.layout, setup.precision
    neighbours = (number > 0) + (number < layout.pipeline - 1)
    between_stages = 2 * streams * neighbours  # there, and their gradients back
    _, arrived = routed_rows(arch, setup.micro_batch, layout)
    is_spread = layout.expert * layout.expert_tensor > 1
    to_experts = 2 * arrived * arch.hidden_size * precision.dtype_bytes * is_spread
    rounded = held.total * precision.dtype_bytes if setup.rounds else 0
    return between_stages + to_experts + rounded


def _state(held: Parameters, setup: Setup) -> tuple[float, float]:
    """Bytes of optimiser state of a rank's experts and of the rest, wherever they are."""
    per_weight = MOMENT_BYTES + (MASTER_BYTES if setup.dtype == "bfloat16" else 0)
    copies = setup.layout.data * setup.layout.context
    dense = held.dense * per_weight + held.dense_exact * MOMENT_BYTES
    return held.experts * per_weight / setup.layout.expert_data, dense / copies


def _host(held: Parameters, setup: Setup) -> HostMemory:
    experts, dense = _state(held, setup)
    share = setup.offload
    # An offloaded FP32 weight has its master on the host as well.
    copies = setup.layout.data * setup.layout.context
    exact = held.dense_exact + (held.dense if setup.dtype == "float32" else 0)
    more = held.experts / setup.layout.expert_data if setup.dtype == "float32" else 0.0
    gradients = held.experts / setup.layout.expert_data
    gradients += (held.dense + held.dense_exact) / copies
    return HostMemory(
        experts=round(share * (experts + MASTER_BYTES * more)),
        dense=round(share * (dense + MASTER_BYTES * exact / copies)),
        gradients=round(share * gradients * FP32_BYTES),
        reference=2 * held.weight_bytes(setup.precision.dtype_bytes) * setup.keeps_reference,
        checkpoint=_saved(held, setup) * setup.background_saves,
    )


def _saved(held: Parameters, setup: Setup) -> int:
    """Of the rank that writes the weights, too; what is written in the foreground is not copied."""
    copies = setup.layout.data * setup.layout.context
    states = held.experts / setup.layout.expert_data + (held.dense + held.dense_exact) / copies
    return held.weight_bytes(setup.precision.dtype_bytes) + round(states * SAVED_BYTES)
