"""Bytes that one micro-batch leaves for its backward pass, and what a pass needs for a moment.

The terms follow the actor's own layers in order: each names a tensor that an operation keeps.
`N` streams, `D` model width, `H` heads of width `K`, `E` experts of inner width `I`, `k` per token.
"""

from dataclasses import dataclass
from typing import Literal

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture
from shared.parallel import Layout

FP32 = 4
INDEX = 8  # int64
Recompute = Literal["none", "selective", "full"]
QUERY_CHUNK = 128  # queries whose attention weights exist at once
TOKEN_CHUNK = 1024  # tokens whose logits exist at once


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`rows` sequences of `length` tokens, of which `scored` are responses; all of one rank."""

    rows: int
    length: int
    scored: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Precision:
    """How activations are stored: `dtype_bytes` 2 or 4; `rounds`: a rounded copy is kept too."""

    dtype_bytes: int
    rounds: bool = False

    @property
    def widened(self) -> int:
        """Bytes per element of the FP32 copy that a BF16 tensor needs."""
        return 0 if self.dtype_bytes == FP32 else FP32


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes of one block and one micro-batch."""

    boundary: int
    """The streams that enter it: all that full recompute keeps."""
    hyper_connections: int
    """With what they hand to attention and experts, before and after the norm."""
    attention: int
    experts: int
    attention_working: int
    """Beyond what is kept, for a moment of its backward pass."""
    experts_working: int

    def kept(self, recompute: Recompute) -> int:
        """For its backward pass."""
        match recompute:
            case "none":
                return self.boundary + self.hyper_connections + self.attention + self.experts
            case "selective":
                return self.boundary + self.hyper_connections
            case "full":
                return self.boundary

    def working(self, recompute: Recompute) -> int:
        """For a moment of it: what is computed again, and what its operations need."""
        working = max(self.attention_working, self.experts_working)
        match recompute:
            case "none":
                return working
            case "selective":
                attention = self.attention + self.attention_working
                return max(attention, self.experts + self.experts_working)
            case "full":
                return self.kept("none") - self.boundary + working


def block_activations(
    arch: Architecture, layer: int, micro: MicroBatch, layout: Layout, precision: Precision
) -> BlockActivations:
    streams = micro.tokens * arch.hc_mult * arch.hidden_size * precision.dtype_bytes
    return BlockActivations(
        boundary=streams,
        hyper_connections=streams + _hyper_connections(arch, micro, precision),
        attention=_attention(arch, layer, micro, layout, precision),
        experts=_experts(arch, micro, layout, precision),
        attention_working=_attention_working(arch, layer, micro, layout, precision),
        experts_working=_experts_working(arch, micro, layout, precision),
    )


def head_activations(
    arch: Architecture, micro: MicroBatch, layout: Layout, precision: Precision
) -> tuple[int, int]:
    """What the output head keeps, and the logits that exist for a moment."""
    b, width = precision.dtype_bytes, arch.hidden_size
    kept = micro.scored * (arch.hc_mult * width * b + 2 * width * b + FP32 * (2 * arch.hc_mult + 4))
    vocabulary = arch.vocab_size // layout.tensor
    chunk = min(TOKEN_CHUNK, micro.scored) * vocabulary * FP32
    matrix = vocabulary * width
    backward = micro.scored * width * FP32 + matrix * FP32
    widening = matrix * precision.widened + matrix * (b if precision.widened else 0)
    return kept, 2 * chunk + max(chunk, backward + widening)


def mtp_activations(
    arch: Architecture, depth: int, micro: MicroBatch, layout: Layout, precision: Precision
) -> int:
    """What a trained block for multi-token prediction keeps: no block of these is recomputed."""
    layer = arch.num_hidden_layers + depth
    block = block_activations(arch, layer, micro, layout, precision).kept("none")
    width = arch.hidden_size * precision.dtype_bytes
    projected = micro.tokens * width * (3 + 2 * arch.hc_mult)  # embeddings and streams, normed
    return block + projected + head_activations(arch, micro, layout, precision)[0]


def _hyper_connections(arch: Architecture, micro: MicroBatch, precision: Precision) -> int:
    """Coefficients of both halves, what goes into the norms and out of them, and the results that
    are merged into the streams."""
    n = arch.hc_mult
    coefficients = 1 + (2 * n + n * n) + 4 * n + 2 * n * n  # raw, gates before and after, mixing
    vectors = 3 * arch.hidden_size * precision.dtype_bytes
    return 2 * micro.tokens * (coefficients * FP32 + vectors)


def _attention(
    arch: Architecture, layer: int, micro: MicroBatch, layout: Layout, precision: Precision
) -> int:
    b, copies = precision.dtype_bytes, 2 if precision.rounds else 1
    heads = arch.num_attention_heads // layout.tensor
    groups = arch.o_groups // layout.tensor
    per_token = (copies - 1) * arch.hidden_size * b  # the rounded input
    per_token += (1 + copies) * arch.q_lora_rank * b
    per_token += 3 * heads * arch.head_dim * b  # queries, mixed values, turned back
    per_token += heads * FP32 + arch.head_dim * (b + FP32)  # scales; K = V, normed and wide
    per_token += groups * arch.o_lora_rank * b
    return micro.tokens * per_token + _compressor(arch, layer, micro, precision)


def _compressor(arch: Architecture, layer: int, micro: MicroBatch, precision: Precision) -> int:
    ratio = arch.compress_ratios[layer]
    if ratio == 0 or micro.length < ratio:
        return 0
    rows = arch.head_dim * (2 if ratio == C4_RATIO else 1)
    entries = micro.rows * (micro.length // ratio)
    # Gates after softmax and values; matrices and inputs widened for each of the two products.
    kept = 2 * micro.tokens * rows * FP32 + 2 * entries * arch.head_dim * FP32
    kept += 2 * (micro.tokens + rows) * arch.hidden_size * precision.widened
    if ratio == C4_RATIO and micro.length // ratio > arch.index_topk:
        kept += micro.tokens * (micro.length // ratio)  # which entries a query may use
    return kept


def routed_rows(arch: Architecture, micro: MicroBatch, layout: Layout) -> tuple[int, int]:
    """Rows that one rank sends to experts, and those that its experts get when routing is even:
    tensor ranks route a part of their tokens each, ranks that share an expert all get its rows."""
    sent = micro.tokens * arch.num_experts_per_tok // layout.tensor
    return sent, sent * layout.expert_tensor


def _experts(arch: Architecture, micro: MicroBatch, layout: Layout, precision: Precision) -> int:
    b, copies = precision.dtype_bytes, 2 if precision.rounds else 1
    sent, arrived = routed_rows(arch, micro, layout)
    inner = arch.moe_intermediate_size // layout.expert_tensor
    kept = micro.tokens * (copies - 1) * arch.hidden_size * b  # the rounded input
    kept += 3 * micro.tokens * arch.n_routed_experts * FP32  # the router's scores
    kept += arrived * (arch.hidden_size * b + 2 * inner * b + FP32) + 2 * sent * INDEX
    if layout.expert * layout.expert_tensor > 1:
        kept += 2 * arrived * INDEX  # their order, and back
    shared = arch.moe_intermediate_size * arch.n_shared_experts // layout.tensor
    return kept + 3 * micro.tokens * shared * b


def _attention_working(
    arch: Architecture, layer: int, micro: MicroBatch, layout: Layout, precision: Precision
) -> int:
    """Gradients of queries and values, and a chunk's weights with their gradient."""
    heads = arch.num_attention_heads // layout.tensor
    ratio = arch.compress_ratios[layer]
    chunk = min(QUERY_CHUNK, micro.length)
    keys = min(micro.length, chunk + arch.sliding_window)
    keys += micro.length // ratio if ratio else 0
    weights = 3 * micro.rows * chunk * heads * keys * FP32
    gradients = 2 * micro.tokens * heads * arch.head_dim * precision.dtype_bytes
    return weights + gradients


def _experts_working(
    arch: Architecture, micro: MicroBatch, layout: Layout, precision: Precision
) -> int:
    """Gradients of the routed rows, and of the layer's experts before they join the FP32 sum."""
    b = precision.dtype_bytes
    _, arrived = routed_rows(arch, micro, layout)
    ranks = layout.expert * layout.expert_tensor
    local = 3 * arch.n_routed_experts * arch.moe_intermediate_size * arch.hidden_size // ranks
    return (
        local * b + 2 * arrived * arch.hidden_size * b + 2 * micro.tokens * arch.hidden_size * FP32
    )
