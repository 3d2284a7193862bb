"""Bytes that one rank sends in one step, by collective. Ring algorithms, even routing."""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.memory import Stage
from shared.planner.parameters import FP32_BYTES
from shared.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class Collective:
    """`num_bytes` leave a rank of stage `stage` in one step, over groups of `ranks`."""

    what: str
    operation: str
    stage: int
    ranks: int
    num_bytes: int
    calls: int


def collectives(arch: Architecture, setup: Setup, stage: Stage) -> list[Collective]:
    """Those of a rank of one stage that send anything."""
    found = [*_of_state(setup, stage), *_of_passes(arch, setup, stage)]
    return [one for one in found if one.ranks > 1 and one.num_bytes]


def _of_state(setup: Setup, stage: Stage) -> Iterator[Collective]:
    """Gradients to the owner of their optimiser state, and new weights back."""
    held, layout, updates = stage.parameters, setup.layout, setup.updates_per_step
    groups = (
        ("dense", held.dense + held.dense_exact, layout.data * layout.context),
        ("experts", held.experts, layout.expert_data),
    )
    for name, elements, ranks in groups:
        share = elements * (ranks - 1) // ranks * updates
        gradients, weights = share * FP32_BYTES, share * setup.precision.dtype_bytes
        yield Collective(
            f"gradients, {name}", "reduce-scatter", stage.number, ranks, gradients, updates
        )
        yield Collective(f"weights, {name}", "all-gather", stage.number, ranks, weights, updates)


def _of_passes(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[Collective]:
    layout, b = setup.layout, setup.precision.dtype_bytes
    tokens, width = setup.micro_batch.tokens, arch.hidden_size
    micro_batches = setup.micro_batches * setup.updates_per_step
    scoring = micro_batches if setup.updates_per_step > 1 else 0
    again = micro_batches if setup.recompute != "none" else 0
    forward, backward = micro_batches + scoring + again, micro_batches
    layers, number = len(stage.layers), stage.number

    def over(ranks: int, times: int) -> float:
        """Share of a buffer that `times` ring passes send."""
        return times * (ranks - 1) / ranks

    streams = tokens * arch.hc_mult * width * b
    onward = (forward - again) * (number < layout.pipeline - 1) + backward * (number > 0)
    yield Collective("streams", "point-to-point", number, layout.pipeline, onward * streams, onward)

    routed = tokens * arch.num_experts_per_tok * width * b
    calls = 2 * layers * (forward + backward)
    sent = round(calls * routed * over(layout.expert, 1))
    yield Collective("tokens to experts", "all-to-all", number, layout.expert, sent, calls)

    calls = 2 * layers * forward + 3 * layers * backward
    size = layers * forward * 2 * tokens * width * b
    size += (
        layers
        * backward
        * tokens
        * (2 * width * b + arch.q_lora_rank * b + arch.head_dim * FP32_BYTES)
    )
    sent = round(size * over(layout.tensor, 2))
    yield Collective("sums over heads", "all-reduce", number, layout.tensor, sent, calls)

    calls = layers * (forward + backward)
    size = calls * tokens * layout.context * arch.head_dim * FP32_BYTES
    sent = round(size * over(layout.context, 1))
    yield Collective("keys of a sequence", "all-gather", number, layout.context, sent, calls)
