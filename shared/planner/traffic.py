"""Bytes that one rank sends in one step, by collective. Ring algorithms, even routing.

Counted are the collectives of passes and of the update, in the order of the actor's layers; numbers
of a few bytes (norms, shapes, agreements) are not. Words: a pass is one of one micro-batch.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture
from shared.planner.activations import TOKEN_CHUNK
from shared.planner.memory import Stage
from shared.planner.parameters import FP32_BYTES
from shared.planner.setup import Setup

INT64_BYTES = 8
RECORD_BYTES = 6 * 8  # what all ranks know of each response token, FP64
Operation = Literal[
    "all-to-all", "all-reduce", "all-gather", "reduce-scatter", "point-to-point", "broadcast"
]


@dataclass(frozen=True, slots=True)
class Collective:
    """`num_bytes` leave a rank of stage `stage` in one step, over groups of `ranks`."""

    what: str
    operation: Operation
    stage: int
    ranks: int
    num_bytes: int
    calls: int
    span: int
    """Consecutive ranks in which a group lies."""


class _Sent(NamedTuple):
    """`times` calls, each with a buffer of `size` bytes: what a rank has in the end, or gives."""

    what: str
    operation: Operation
    size: float
    times: int


def collectives(arch: Architecture, setup: Setup, stage: Stage) -> list[Collective]:
    """Those of a rank of one stage that send anything."""
    layout = setup.layout
    context = layout.tensor * layout.context
    experts = layout.expert * layout.expert_tensor
    ends = (min(layout.pipeline, 2), layout.world)
    groups = [  # ranks and span
        ((layout.data * layout.context, layout.stage_ranks), _of_dense_state(setup, stage)),
        ((layout.expert_data, layout.stage_ranks), _of_expert_state(setup, stage)),
        ((layout.pipeline, layout.world), _of_streams(arch, setup, stage)),
        (ends, _of_embedding(arch, setup, stage)),
        ((experts, experts), _of_routed(arch, setup, stage)),
        ((layout.tensor, layout.tensor), _of_heads(arch, setup, stage)),
        ((layout.context, context), _of_context(arch, setup, stage)),
        ((layout.world, layout.world), _of_records(setup)),
    ]
    return [
        _collective(*key, list(found), stage.number, ranks, span)
        for (ranks, span), sent in groups
        if ranks > 1
        for key, found in _by_kind(sent).items()
    ]


def _by_kind(sent: Iterator[_Sent]) -> dict[tuple[str, Operation], list[_Sent]]:
    kinds: dict[tuple[str, Operation], list[_Sent]] = defaultdict(list)
    for one in sent:
        if one.size and one.times:
            kinds[one.what, one.operation].append(one)
    return kinds


def _collective(
    what: str, operation: Operation, sent: list[_Sent], stage: int, ranks: int, span: int
) -> Collective:
    buffers = sum(one.size * one.times for one in sent)
    share = {"point-to-point": 1.0, "broadcast": 1.0, "all-reduce": 2 * (ranks - 1) / ranks}
    num_bytes = round(buffers * share.get(operation, (ranks - 1) / ranks))
    calls = sum(one.times for one in sent)
    return Collective(what, operation, stage, ranks, num_bytes, calls, span)


@dataclass(frozen=True, slots=True)
class _Passes:
    """How often a step runs a layer: `forward` counts what is computed again."""

    once: int
    """Forward, without what is computed again."""
    forward: int
    backward: int

    @classmethod
    def of(cls, setup: Setup) -> "_Passes":
        trained = setup.micro_batches * setup.updates_per_step
        scoring = setup.keeps_reference + (setup.updates_per_step > 1)
        once = trained + scoring * setup.micro_batches * setup.updates_per_step
        return cls(once, once + trained * (setup.recompute != "none"), trained)


def _of_dense_state(setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """Gradients to the owner of their optimiser state, and new weights back; FP32 weights of a BF16
    actor have a buffer of their own."""
    held, updates, b = stage.parameters, setup.updates_per_step, setup.precision.dtype_bytes
    parts = [(held.dense, b), (held.dense_exact, FP32_BYTES)]
    if b == FP32_BYTES:
        parts = [(held.dense + held.dense_exact, b)]
    for elements, size in parts:
        yield _Sent("gradients, dense", "reduce-scatter", elements * FP32_BYTES, updates)
        yield _Sent("weights, dense", "all-gather", elements * size, updates)


def _of_expert_state(setup: Setup, stage: Stage) -> Iterator[_Sent]:
    held, updates = stage.parameters.experts, setup.updates_per_step
    yield _Sent("gradients, experts", "reduce-scatter", held * FP32_BYTES, updates)
    yield _Sent("weights, experts", "all-gather", held * setup.precision.dtype_bytes, updates)


def _of_streams(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    passes, last = _Passes.of(setup), setup.layout.pipeline - 1
    size = setup.micro_batch.tokens * arch.hc_mult * arch.hidden_size * setup.precision.dtype_bytes
    yield _Sent("streams", "point-to-point", size, passes.once * (stage.number < last))
    yield _Sent("streams", "point-to-point", size, passes.backward * (stage.number > 0))


def _of_embedding(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """To the last stage, whose MTP blocks read it, from the first."""
    if setup.trains_mtp and stage.number == 0:
        rows = arch.vocab_size // setup.layout.tensor
        size = rows * arch.hidden_size * setup.precision.dtype_bytes
        yield _Sent("embedding for MTP", "broadcast", size, setup.updates_per_step)


def _of_routed(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """Rows with their weights to the experts, results back, and the same for gradients. Tensor
    ranks route a part of their tokens each; ranks that share an expert all get its rows."""
    layout, passes, b = setup.layout, _Passes.of(setup), setup.precision.dtype_bytes
    rows = setup.micro_batch.tokens * arch.num_experts_per_tok / layout.tensor
    rows *= layout.expert_tensor
    counts = arch.n_routed_experts * INT64_BYTES * layout.expert * layout.expert_tensor
    forward, backward = _layer_passes(arch, setup, stage, passes)
    for width in (arch.hidden_size * b, FP32_BYTES, arch.hidden_size * b):
        yield _Sent("tokens to experts", "all-to-all", rows * width, forward + backward)
    yield _Sent("rows for each expert", "all-gather", counts, forward)


def _layer_passes(
    arch: Architecture, setup: Setup, stage: Stage, passes: _Passes
) -> tuple[int, int]:
    """Of all layers of a stage, MTP blocks that are trained included: these are never computed
    again, nor used for scoring."""
    blocks = _mtp_blocks(arch, setup, stage)
    layers = len(stage.layers)
    if setup.recomputed_blocks is not None:
        again = min(setup.recomputed_blocks, layers) * (passes.forward - passes.once)
    else:
        again = layers * (passes.forward - passes.once)
    forward = layers * passes.once + again + blocks * passes.backward
    return forward, (layers + blocks) * passes.backward


def _mtp_blocks(arch: Architecture, setup: Setup, stage: Stage) -> int:
    is_last = stage.number == setup.layout.pipeline - 1
    return arch.num_nextn_predict_layers * (is_last and setup.trains_mtp)


def _of_heads(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """Sums over the parts of matrices, and tokens that are routed by one tensor rank each."""
    micro, b, passes = setup.micro_batch, setup.precision.dtype_bytes, _Passes.of(setup)
    tokens, width = micro.tokens, arch.hidden_size
    forward, backward = _layer_passes(arch, setup, stage, passes)
    what, gathered = "sums over heads", "routed tokens"
    yield _Sent(what, "all-reduce", tokens * width * b, 2 * forward + 2 * backward)
    yield _Sent(what, "all-reduce", tokens * arch.q_lora_rank * b, backward)
    yield _Sent(what, "all-reduce", tokens * arch.head_dim * FP32_BYTES, backward)
    for layer in stage.layers:
        entries = micro.rows * _entries(arch, layer, micro.length)
        yield _Sent(
            what,
            "all-reduce",
            entries * arch.head_dim * FP32_BYTES,
            passes.backward * (entries > 0),
        )
    yield _Sent(gathered, "all-gather", tokens * width * FP32_BYTES, forward)
    yield _Sent(gathered, "all-gather", tokens * width * b, backward)
    yield _Sent(gathered, "all-gather", tokens * arch.num_experts_per_tok * FP32_BYTES, backward)
    if stage.number == 0:
        yield _Sent("embedding", "all-reduce", tokens * width * b, passes.once)
    yield from _of_vocabulary(arch, setup, stage)


def _of_vocabulary(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """Of the output head: four numbers of each token, and the gradient of its input."""
    if stage.number != setup.layout.pipeline - 1:
        return
    micro, passes, what = setup.micro_batch, _Passes.of(setup), "vocabulary"
    blocks = _mtp_blocks(arch, setup, stage)
    chunks = -(-micro.scored // TOKEN_CHUNK)
    uses = passes.once + blocks * passes.backward
    yield _Sent(what, "all-reduce", micro.scored / chunks * FP32_BYTES, 4 * chunks * uses)
    size = micro.scored * arch.hidden_size * FP32_BYTES
    yield _Sent(what, "all-reduce", size, (1 + blocks) * passes.backward)
    embedded = micro.tokens * arch.hidden_size * setup.precision.dtype_bytes
    yield _Sent(what, "all-reduce", embedded, blocks * passes.backward)


def _of_context(arch: Architecture, setup: Setup, stage: Stage) -> Iterator[_Sent]:
    """Keys and entries of whole rows, and what a compressor reads of the block before."""
    passes, b = _Passes.of(setup), setup.precision.dtype_bytes
    for layer, again in zip(stage.layers, _computed_again(setup, stage, passes), strict=True):
        for size in _gathered(arch, setup, layer):
            yield _Sent("keys of a sequence", "all-gather", size, passes.once + again)
            yield _Sent("keys of a sequence", "reduce-scatter", size, passes.backward)
        for size in _indexed(arch, setup, layer, b):  # without gradients
            yield _Sent("keys of a sequence", "all-gather", size, passes.once + again)
    if stage.number == setup.layout.pipeline - 1:
        scored = 2 * setup.micro_batch.scored * setup.layout.context * FP32_BYTES
        yield _Sent("scores of a sequence", "all-reduce", scored, passes.once)


def _computed_again(setup: Setup, stage: Stage, passes: _Passes) -> list[int]:
    """How often each layer's forward pass is."""
    limit = setup.recomputed_blocks
    more = passes.forward - passes.once
    return [more * (limit is None or index < limit) for index in range(len(stage.layers))]


def _gathered(arch: Architecture, setup: Setup, layer: int) -> list[int]:
    """Bytes of whole rows: keys, entries, and twice the block before."""
    micro, ranks = setup.micro_batch, setup.layout.context
    width = arch.head_dim * FP32_BYTES * ranks
    sizes = [micro.tokens * width]
    if entries := _entries(arch, layer, micro.length):
        sizes.append(micro.rows * entries * width)
        if arch.compress_ratios[layer] == C4_RATIO:
            sizes += 2 * [micro.rows * C4_RATIO * width]
    return sizes


def _indexed(arch: Architecture, setup: Setup, layer: int, b: int) -> list[int]:
    """The indexer's keys, where there are more entries than it selects."""
    micro, ranks = setup.micro_batch, setup.layout.context
    if arch.compress_ratios[layer] != C4_RATIO:
        return []
    if ranks * micro.length // C4_RATIO <= arch.index_topk:
        return []
    width = arch.index_head_dim * ranks
    entries = micro.rows * _entries(arch, layer, micro.length)
    return [entries * width * b, *2 * [micro.rows * C4_RATIO * width * FP32_BYTES]]


def _entries(arch: Architecture, layer: int, length: int) -> int:
    ratio = arch.compress_ratios[layer]
    return length // ratio if ratio else 0


def _of_records(setup: Setup) -> Iterator[_Sent]:
    """What was found of every response token, to all ranks."""
    passes = _Passes.of(setup)
    tokens = setup.samples_per_step * min(setup.response_tokens, setup.sample_tokens)
    rounds = passes.once // max(setup.micro_batches, 1)
    yield _Sent(
        "records of tokens",
        "all-reduce",
        tokens / setup.updates_per_step * RECORD_BYTES,
        rounds,
    )
