"""Which format each tensor of a release has: the one table behind export, loaders and converters.

No torch here, so that planners and manifests can ask, too. A name the table does not know is an
error, never a default.
"""

import re
from dataclasses import dataclass
from typing import Literal

Format = Literal["fp8", "fp4", "bf16", "fp32", "int64"]
ScaleType = Literal["e8m0", "fp32"]
WeightClass = Literal["linear", "expert", "plain", "exact", "table"]

WEIGHT_CLASSES: dict[str, WeightClass] = {
    "embed.weight": "plain",
    "head.weight": "plain",
    "norm.weight": "plain",
    "hc_head_fn": "exact",
    "hc_head_base": "exact",
    "hc_head_scale": "exact",
    "attn_norm.weight": "plain",
    "ffn_norm.weight": "plain",
    "hc_attn_fn": "exact",
    "hc_attn_base": "exact",
    "hc_attn_scale": "exact",
    "hc_ffn_fn": "exact",
    "hc_ffn_base": "exact",
    "hc_ffn_scale": "exact",
    "attn.wq_a.weight": "linear",
    "attn.q_norm.weight": "plain",
    "attn.wq_b.weight": "linear",
    "attn.wkv.weight": "linear",
    "attn.kv_norm.weight": "plain",
    "attn.wo_a.weight": "linear",
    "attn.wo_b.weight": "linear",
    "attn.attn_sink": "exact",
    "attn.compressor.wkv.weight": "plain",
    "attn.compressor.wgate.weight": "plain",
    "attn.compressor.ape": "exact",
    "attn.compressor.norm.weight": "plain",
    "attn.indexer.wq_b.weight": "linear",
    "attn.indexer.weights_proj.weight": "plain",
    "attn.indexer.compressor.wkv.weight": "plain",
    "attn.indexer.compressor.wgate.weight": "plain",
    "attn.indexer.compressor.ape": "exact",
    "attn.indexer.compressor.norm.weight": "plain",
    "ffn.gate.weight": "plain",
    "ffn.gate.bias": "exact",
    "ffn.gate.tid2eid": "table",
    "ffn.experts.*.w1.weight": "expert",
    "ffn.experts.*.w2.weight": "expert",
    "ffn.experts.*.w3.weight": "expert",
    "ffn.shared_experts.w1.weight": "linear",
    "ffn.shared_experts.w2.weight": "linear",
    "ffn.shared_experts.w3.weight": "linear",
    "enorm.weight": "plain",
    "hnorm.weight": "plain",
    "e_proj.weight": "linear",
    "h_proj.weight": "linear",
}

_BLOCK = re.compile(r"^(?:layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"^ffn\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Policy:
    """Formats by class; ``exact`` tensors are FP32 and ``table`` tensors int64 in every policy."""

    linear: Format
    expert: Format
    plain: Format = "bf16"
    scale: ScaleType = "e8m0"


POLICIES: dict[str, Policy] = {
    "fp8": Policy(linear="fp8", expert="fp8"),
    "fp4": Policy(linear="fp8", expert="fp4"),
    "bf16": Policy(linear="bf16", expert="bf16"),
    "fp32": Policy(linear="fp32", expert="fp32", plain="fp32"),
}
"""By ``Architecture.weight_format``."""


def format_of(name: str, policy: Policy) -> Format:
    """Format of a tensor by its release name (not of a ``.scale``); KeyError if unknown."""
    match weight_class(name):
        case "linear":
            return policy.linear
        case "expert":
            return policy.expert
        case "plain":
            return policy.plain
        case "exact":
            return "fp32"
        case "table":
            return "int64"


def weight_class(name: str) -> WeightClass:
    """Row of the table for a release name, whatever its layer and expert."""
    tail = _EXPERT.sub("ffn.experts.*.", _BLOCK.sub("", name))
    try:
        return WEIGHT_CLASSES[tail]
    except KeyError:
        raise KeyError(f"{name}: no such tensor in the format table") from None


def scale_name(name: str) -> str:
    """Name of the scales of a quantised matrix: ``X.weight`` has ``X.scale``."""
    if not name.endswith(".weight"):
        raise ValueError(f"{name}: only a '.weight' has scales")
    return name.removesuffix("weight") + "scale"


def is_scale(name: str) -> bool:
    """Whether a release name is that of a quantised matrix's scales."""
    return name.endswith(".scale")
