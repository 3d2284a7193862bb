"""A rough time of one step, to order layouts by; never a promise.

Products at a sustained rate, waiting stages of the pipeline, and sent bytes at the speed of the
links they cross. Attention over a window costs little beside the matrices and is left out.
"""

from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.plan import Plan
from shared.planner.traffic import Collective

# Assumed, of one GPU: a third of an MI355X's or H200's dense BF16 rate, and half of its links.
FLOPS_PER_S = 4e14
NODE_BYTES_PER_S = 3e11
NETWORK_BYTES_PER_S = 4e10


def step_seconds(arch: Architecture, found: Plan) -> float:
    """Of the busiest stage, when every sample is as long as it may be."""
    setup = found.setup
    passes = 3 + (setup.recompute != "none") + (setup.updates_per_step > 1) + setup.keeps_reference
    waiting = (setup.micro_batches + setup.layout.pipeline - 1) / setup.micro_batches
    tokens = setup.micro_batch.tokens * setup.micro_batches * setup.updates_per_step
    slowest = 0.0
    for stage in found.stages:
        flops = 2 * passes * tokens * _active(arch, found, stage.number)
        sent = sum(_seconds(one, found) for one in found.traffic if one.stage == stage.number)
        slowest = max(slowest, flops / FLOPS_PER_S * waiting + sent)
    return slowest


def _active(arch: Architecture, found: Plan, number: int) -> float:
    """Parameters of a stage that one token meets, on one tensor-parallel rank."""
    layout, stage = found.setup.layout, found.stages[number]
    vocabulary = arch.vocab_size * arch.hidden_size
    expert = 3 * arch.hidden_size * arch.moe_intermediate_size
    routed = len(stage.layers) * arch.num_experts_per_tok * expert
    looked_up = vocabulary if number == 0 else 0  # rows of the embedding are no product
    return stage.parameters.dense + (routed - looked_up) / layout.tensor


def _seconds(one: Collective, found: Plan) -> float:
    inside = one.span <= found.machine.gpus_per_node
    return one.num_bytes / (NODE_BYTES_PER_S if inside else NETWORK_BYTES_PER_S)
