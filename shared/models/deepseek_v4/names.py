"""Every tensor of a release by name, shape and stored dtype, and its place in three runtimes.

`*_SHAPES` list the tensors, `*_NAMES` say where transformers, the actor on Megatron-core and SGLang
keep each: converters and the actor's loader read the second column, updates of servers are grouped
by the third. In a runtime name ``#i`` marks the i-th row block of a fused matrix (an expert is an
index into a stacked tensor), ``=`` is the release's name, ``-`` a tensor that the runtime lacks.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shared.models.deepseek_v4.architecture import C4_RATIO, FP4_GROUP, QUANT_BLOCK, Architecture
from shared.quant.policy import POLICIES, Format, Policy, format_of, scale_name, weight_class

Runtime = Literal["transformers", "megatron", "sglang"]
StoredType = Literal["F32", "BF16", "F8_E4M3", "F8_E8M0", "I8", "I64"]
Condition = Literal["always", "compressed", "c4", "hash", "learned", "expert"]

# D hidden, V vocabulary, HK heads x head dim, K head dim, Q query rank, H heads, G output groups,
# R output rank, I indexer head dim, F expert inner, E experts, k experts per token, S streams,
# r ratio of the layer, cK and cI compressor width (twice K or I where blocks overlap)
MODEL_SHAPES: dict[str, str] = {
    "embed.weight": "V D",
    "head.weight": "V D",
    "norm.weight": "D",
    "hc_head_fn": "S SD",
    "hc_head_base": "S",
    "hc_head_scale": "1",
}
BLOCK_SHAPES: dict[str, tuple[Condition, str]] = {
    "attn_norm.weight": ("always", "D"),
    "ffn_norm.weight": ("always", "D"),
    "hc_attn_fn": ("always", "M SD"),
    "hc_attn_base": ("always", "M"),
    "hc_attn_scale": ("always", "3"),
    "hc_ffn_fn": ("always", "M SD"),
    "hc_ffn_base": ("always", "M"),
    "hc_ffn_scale": ("always", "3"),
    "attn.wq_a.weight": ("always", "Q D"),
    "attn.q_norm.weight": ("always", "Q"),
    "attn.wq_b.weight": ("always", "HK Q"),
    "attn.wkv.weight": ("always", "K D"),
    "attn.kv_norm.weight": ("always", "K"),
    "attn.attn_sink": ("always", "H"),
    "attn.wo_a.weight": ("always", "GR HK/G"),
    "attn.wo_b.weight": ("always", "D GR"),
    "attn.compressor.wkv.weight": ("compressed", "cK D"),
    "attn.compressor.wgate.weight": ("compressed", "cK D"),
    "attn.compressor.ape": ("compressed", "r cK"),
    "attn.compressor.norm.weight": ("compressed", "K"),
    "attn.indexer.wq_b.weight": ("c4", "NI Q"),
    "attn.indexer.weights_proj.weight": ("c4", "N D"),
    "attn.indexer.compressor.wkv.weight": ("c4", "cI D"),
    "attn.indexer.compressor.wgate.weight": ("c4", "cI D"),
    "attn.indexer.compressor.ape": ("c4", "r cI"),
    "attn.indexer.compressor.norm.weight": ("c4", "I"),
    "ffn.gate.weight": ("always", "E D"),
    "ffn.gate.bias": ("learned", "E"),
    "ffn.gate.tid2eid": ("hash", "V k"),
    "ffn.experts.*.w1.weight": ("expert", "F D"),
    "ffn.experts.*.w2.weight": ("expert", "D F"),
    "ffn.experts.*.w3.weight": ("expert", "F D"),
    "ffn.shared_experts.w1.weight": ("always", "F D"),
    "ffn.shared_experts.w2.weight": ("always", "D F"),
    "ffn.shared_experts.w3.weight": ("always", "F D"),
}
MTP_SHAPES: dict[str, str] = {
    "enorm.weight": "D",
    "hnorm.weight": "D",
    "e_proj.weight": "D D",
    "h_proj.weight": "D D",
    "norm.weight": "D",
    "hc_head_fn": "S SD",
    "hc_head_base": "S",
    "hc_head_scale": "1",
}

# release name: (transformers, the actor, SGLang)
MODEL_NAMES: dict[str, tuple[str, str, str]] = {
    "embed.weight": ("model.embed_tokens.weight", "=", "model.embed_tokens.weight"),
    "head.weight": ("lm_head.weight", "=", "lm_head.weight"),
    "norm.weight": ("model.norm.weight", "=", "model.norm.weight"),
    "hc_head_fn": ("model.hc_head.hc_fn", "hc_head.fn", "model.hc_head_fn"),
    "hc_head_base": ("model.hc_head.hc_base", "hc_head.base", "model.hc_head_base"),
    "hc_head_scale": ("model.hc_head.hc_scale", "hc_head.scale", "model.hc_head_scale"),
}
BLOCK_NAMES: dict[str, tuple[str, str, str]] = {
    "attn_norm.weight": ("input_layernorm.weight", "=", "input_layernorm.weight"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "=", "post_attention_layernorm.weight"),
    "hc_attn_fn": ("attn_hc.fn", "hc_attn.fn", "="),
    "hc_attn_base": ("attn_hc.base", "hc_attn.base", "="),
    "hc_attn_scale": ("attn_hc.scale", "hc_attn.scale", "="),
    "hc_ffn_fn": ("ffn_hc.fn", "hc_ffn.fn", "="),
    "hc_ffn_base": ("ffn_hc.base", "hc_ffn.base", "="),
    "hc_ffn_scale": ("ffn_hc.scale", "hc_ffn.scale", "="),
    "attn.wq_a.weight": ("self_attn.q_a_proj.weight", "=", "self_attn.wqkv_a.weight#0"),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight", "=", "self_attn.q_norm.weight"),
    "attn.wq_b.weight": ("self_attn.q_b_proj.weight", "=", "self_attn.wq_b.weight"),
    "attn.wkv.weight": ("self_attn.kv_proj.weight", "=", "self_attn.wqkv_a.weight#1"),
    "attn.kv_norm.weight": ("self_attn.kv_norm.weight", "=", "self_attn.kv_norm.weight"),
    "attn.attn_sink": ("self_attn.sinks", "=", "self_attn.attn_sink"),
    "attn.wo_a.weight": ("self_attn.o_a_proj.weight", "=", "self_attn.wo_a.weight"),
    "attn.wo_b.weight": ("self_attn.o_b_proj.weight", "=", "self_attn.wo_b.weight"),
    "attn.compressor.wkv.weight": (
        "self_attn.compressor.kv_proj.weight",
        "=",
        "self_attn.compressor.wkv_gate.weight#0",
    ),
    "attn.compressor.wgate.weight": (
        "self_attn.compressor.gate_proj.weight",
        "=",
        "self_attn.compressor.wkv_gate.weight#1",
    ),
    "attn.compressor.ape": ("self_attn.compressor.position_bias", "=", "self_attn.compressor.ape"),
    "attn.compressor.norm.weight": (
        "self_attn.compressor.kv_norm.weight",
        "=",
        "self_attn.compressor.norm.weight",
    ),
    "attn.indexer.wq_b.weight": (
        "self_attn.compressor.indexer.q_b_proj.weight",
        "=",
        "self_attn.indexer.wq_b.weight",
    ),
    "attn.indexer.weights_proj.weight": (
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "=",
        "self_attn.indexer.weights_proj.weight",
    ),
    "attn.indexer.compressor.wkv.weight": (
        "self_attn.compressor.indexer.kv_proj.weight",
        "=",
        "self_attn.indexer.compressor.wkv_gate.weight#0",
    ),
    "attn.indexer.compressor.wgate.weight": (
        "self_attn.compressor.indexer.gate_proj.weight",
        "=",
        "self_attn.indexer.compressor.wkv_gate.weight#1",
    ),
    "attn.indexer.compressor.ape": (
        "self_attn.compressor.indexer.position_bias",
        "=",
        "self_attn.indexer.compressor.ape",
    ),
    "attn.indexer.compressor.norm.weight": (
        "self_attn.compressor.indexer.kv_norm.weight",
        "=",
        "self_attn.indexer.compressor.norm.weight",
    ),
    "ffn.gate.weight": ("mlp.gate.weight", "=", "mlp.gate.weight"),
    "ffn.gate.bias": ("mlp.gate.e_score_correction_bias", "=", "mlp.gate.e_score_correction_bias"),
    "ffn.gate.tid2eid": ("mlp.gate.tid2eid", "=", "mlp.topk.tid2eid"),
    "ffn.experts.*.w1.weight": (
        "mlp.experts.gate_up_proj#0",
        "ffn.experts.w13#0",
        "mlp.experts.w13_weight#0",
    ),
    "ffn.experts.*.w2.weight": ("mlp.experts.down_proj", "ffn.experts.w2", "mlp.experts.w2_weight"),
    "ffn.experts.*.w3.weight": (
        "mlp.experts.gate_up_proj#1",
        "ffn.experts.w13#1",
        "mlp.experts.w13_weight#1",
    ),
    "ffn.shared_experts.w1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "=",
        "mlp.shared_experts.gate_up_proj.weight#0",
    ),
    "ffn.shared_experts.w2.weight": (
        "mlp.shared_experts.down_proj.weight",
        "=",
        "mlp.shared_experts.down_proj.weight",
    ),
    "ffn.shared_experts.w3.weight": (
        "mlp.shared_experts.up_proj.weight",
        "=",
        "mlp.shared_experts.gate_up_proj.weight#1",
    ),
}
MTP_NAMES: dict[str, tuple[str, str, str]] = {
    "enorm.weight": ("-", "=", "="),
    "hnorm.weight": ("-", "=", "="),
    "e_proj.weight": ("-", "=", "="),
    "h_proj.weight": ("-", "=", "="),
    "norm.weight": ("-", "=", "shared_head.norm.weight"),
    "hc_head_fn": ("-", "hc_head.fn", "="),
    "hc_head_base": ("-", "hc_head.base", "="),
    "hc_head_scale": ("-", "hc_head.scale", "="),
}
_RUNTIMES: tuple[Runtime, ...] = ("transformers", "megatron", "sglang")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor, and the matrix it is part of.

    A ``.scale`` belongs to its ``.weight``; FP4 codes hold two values of `weight_shape` in a byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredType
    format: Format
    weight: str
    weight_shape: tuple[int, ...]

    @property
    def is_scale(self) -> bool:
        """Whether it holds scales, not codes or values."""
        return self.name != self.weight


@dataclass(frozen=True, slots=True)
class Place:
    """Where a runtime keeps a release tensor, or one element of it."""

    name: str
    expert: int | None = None
    """Index along the first dimension of a tensor that stacks all experts."""
    row: int | None = None
    """Which row block of a fused matrix (0 comes first)."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor of one model: its table row and where it stands."""

    tail: str
    block: str  # "", "layers.N." or "mtp.N."
    layer: int  # an MTP block follows the last layer
    expert: int | None
    shape: tuple[int, ...]
    runtime_names: tuple[str, str, str]

    @property
    def name(self) -> str:
        tail = self.tail if self.expert is None else self.tail.replace("*", str(self.expert))
        return self.block + tail


def tensor_specs(arch: Architecture, *, policy: Policy | None = None) -> dict[str, TensorSpec]:
    """Every stored tensor by release name, ``.scale`` included: 69,187 for Flash."""
    chosen = policy or POLICIES[arch.weight_format]
    return {
        spec.name: spec
        for weight in _weights(arch)
        for spec in _stored(weight.name, weight.shape, chosen)
    }


def weight_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Release name -> shape of the values: what a model in full precision holds, no scales."""
    return {weight.name: weight.shape for weight in _weights(arch)}


def fused_partner(name: str) -> str | None:
    """The release tensor whose rows SGLang keeps in one matrix with those of `name`, or None: both
    must come in one call."""
    expert = _EXPERT.search(name)
    block = _BLOCK.match(name)
    if block is None:
        return None
    tail = _EXPERT.sub("experts.*.", name.removeprefix(block[0]))
    partner = _FUSED.get(tail)
    if partner is None:
        return None
    return block[0] + (partner if expert is None else partner.replace("experts.*.", expert[0]))


def _fused_pairs() -> dict[str, str]:
    """Tail -> the tail that is fused with it, as SGLang's column says."""
    matrices: dict[str, list[str]] = {}
    for tail, (_, _, text) in BLOCK_NAMES.items():
        if "#" in text:
            matrices.setdefault(text.partition("#")[0], []).append(tail)
    return {one: other for pair in matrices.values() for one, other in (pair, pair[::-1])}


_BLOCK = re.compile(r"(layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_FUSED = _fused_pairs()


def places(arch: Architecture, runtime: Runtime) -> dict[str, Place]:
    """Release name -> where `runtime` keeps it; tensors that it does not have are left out.

    Scales of matrices that a release can quantise are in, except for the actor, which has none.
    """
    column = _RUNTIMES.index(runtime)
    table: dict[str, Place] = {}
    for weight in _weights(arch):
        text = weight.runtime_names[column]
        if text == "-" or (runtime == "transformers" and weight.block.startswith("mtp.")):
            continue
        text = weight.tail if text == "=" else text
        table[weight.name] = _place(_prefix(weight, runtime) + text, weight.expert)
        if runtime != "megatron" and weight_class(weight.name) in ("linear", "expert"):
            table[scale_name(weight.name)] = _scale(table[weight.name])
    return table


def inverse(table: Mapping[str, Place]) -> dict[Place, str]:
    """Place -> release name."""
    return {place: name for name, place in table.items()}


def trace_points(arch: Architecture) -> list[str]:
    """The names that every implementation gives to its inner states, in order of computation."""
    points = ["embed"]
    for layer in range(arch.num_hidden_layers):
        points += [f"layers.{layer}.{part}" for part in block_trace_points(arch, layer)]
    return [*points, "hc_head.mix", "norm", "logits"]


def block_trace_points(arch: Architecture, layer: int) -> list[str]:
    """The same inside one block."""
    kind = arch.kind(layer)
    attention = ["attn.norm", "attn.q", "attn.kv"]
    attention += ["attn.compressor"] if kind != "window" else []
    attention += ["attn.indexer.scores", "attn.indexer"] if kind == "c4" else []
    attention += ["attn.core", "attn"]
    experts = ["ffn.norm", "router", "experts", "shared_experts", "ffn"]
    before, after = ("mix", "post", "comb"), "merge"
    return [
        *(f"hc_attn.{part}" for part in before),
        *(*attention, f"hc_attn.{after}"),
        *(f"hc_ffn.{part}" for part in before),
        *(*experts, f"hc_ffn.{after}"),
    ]


def _weights(arch: Architecture) -> Iterator[_Weight]:
    sizes = _sizes(arch)
    for tail in ("embed.weight",):
        yield _weight(tail, "", 0, MODEL_SHAPES[tail], MODEL_NAMES[tail], sizes)
    for layer in range(arch.num_hidden_layers):
        yield from _block(arch, f"layers.{layer}.", layer)
    for tail, dims in MODEL_SHAPES.items():
        if tail != "embed.weight":
            yield _weight(tail, "", 0, dims, MODEL_NAMES[tail], sizes)
    for depth in range(arch.num_nextn_predict_layers):
        block, layer = f"mtp.{depth}.", arch.num_hidden_layers + depth
        for tail, dims in MTP_SHAPES.items():
            yield _weight(tail, block, layer, dims, MTP_NAMES[tail], sizes)
        yield from _block(arch, block, layer)


def _block(arch: Architecture, block: str, layer: int) -> Iterator[_Weight]:
    sizes = _sizes(arch) | _compressor_sizes(arch, layer)
    for tail, (condition, dims) in BLOCK_SHAPES.items():
        if not _applies(arch, layer, condition):
            continue
        weight = _weight(tail, block, layer, dims, BLOCK_NAMES[tail], sizes)
        if condition != "expert":
            yield weight
            continue
        for expert in range(arch.n_routed_experts):
            yield replace(weight, expert=expert)


def _applies(arch: Architecture, layer: int, condition: Condition) -> bool:
    match condition:
        case "always" | "expert":
            return True
        case "compressed":
            return arch.kind(layer) != "window"
        case "c4":
            return arch.kind(layer) == "c4"
        case "hash":
            return arch.is_hash_routed(layer)
        case "learned":
            return not arch.is_hash_routed(layer)


def _weight(
    tail: str, block: str, layer: int, dims: str, names: tuple[str, str, str], sizes: dict[str, int]
) -> _Weight:
    shape = tuple(sizes[dim] for dim in dims.split())
    return _Weight(tail, block, layer, None, shape, names)


def _sizes(arch: Architecture) -> dict[str, int]:
    heads = arch.num_attention_heads * arch.head_dim
    streams = arch.hc_mult
    return {
        "1": 1,
        "3": 3,
        "V": arch.vocab_size,
        "D": arch.hidden_size,
        "S": streams,
        "SD": streams * arch.hidden_size,
        "M": 2 * streams + streams * streams,
        "H": arch.num_attention_heads,
        "K": arch.head_dim,
        "HK": heads,
        "HK/G": heads // arch.o_groups,
        "GR": arch.o_groups * arch.o_lora_rank,
        "Q": arch.q_lora_rank,
        "N": arch.index_n_heads,
        "I": arch.index_head_dim,
        "NI": arch.index_n_heads * arch.index_head_dim,
        "E": arch.n_routed_experts,
        "F": arch.moe_intermediate_size,
        "k": arch.num_experts_per_tok,
    }


def _compressor_sizes(arch: Architecture, layer: int) -> dict[str, int]:
    ratio = arch.compress_ratios[layer]
    halves = 2 if ratio == C4_RATIO else 1
    return {"r": ratio, "cK": halves * arch.head_dim, "cI": halves * arch.index_head_dim}


def _stored(name: str, shape: tuple[int, ...], policy: Policy) -> Iterator[TensorSpec]:
    tensor_format = format_of(name, policy)
    match tensor_format:
        case "fp8":
            rows, columns = shape
            grid = (math.ceil(rows / QUANT_BLOCK), math.ceil(columns / QUANT_BLOCK))
            scale: StoredType = "F8_E8M0" if policy.scale == "e8m0" else "F32"
            yield TensorSpec(name, shape, "F8_E4M3", tensor_format, name, shape)
            yield TensorSpec(scale_name(name), grid, scale, tensor_format, name, shape)
        case "fp4":
            rows, columns = shape
            codes, grid = (rows, columns // 2), (rows, columns // FP4_GROUP)
            yield TensorSpec(name, codes, "I8", tensor_format, name, shape)
            yield TensorSpec(scale_name(name), grid, "F8_E8M0", tensor_format, name, shape)
        case "bf16":
            yield TensorSpec(name, shape, "BF16", tensor_format, name, shape)
        case "fp32":
            yield TensorSpec(name, shape, "F32", tensor_format, name, shape)
        case "int64":
            yield TensorSpec(name, shape, "I64", tensor_format, name, shape)


def _prefix(weight: _Weight, runtime: Runtime) -> str:
    """Other runtimes count an MTP block as a layer behind the last."""
    if not weight.block or runtime == "megatron":
        return weight.block
    return f"model.layers.{weight.layer}."


def _place(text: str, expert: int | None) -> Place:
    name, _, row = text.partition("#")
    return Place(name, expert, int(row) if row else None)


def _scale(place: Place) -> Place:
    return replace(place, name=f"{place.name}_scale_inv")
