"""The architecture of a directory that transformers saved: its config renames or drops some keys.

Only what the release's keys cannot tell is derived, and only from what is there: no default.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture

_ATTENTION = {
    "sliding_attention": 0,
    "compressed_sparse_attention": C4_RATIO,
    "heavily_compressed_attention": None,  # the one ratio that `compress_rates` names
}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """ValueError names a key that is missing, as everywhere."""
    derived: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "compress_ratios": _compress_ratios,
        "num_hash_layers": _num_hash_layers,
        "rope_scaling": _rope_scaling,
        "torch_dtype": _dtype,
    }
    missing = {key: derive(config) for key, derive in derived.items() if config.get(key) is None}
    return Architecture.from_config({**config, **missing})


def _compress_ratios(config: Mapping[str, Any]) -> list[int]:
    rates = _need(config, "compress_rates")
    ratios = []
    for kind in _need(config, "layer_types"):
        if kind not in _ATTENTION:
            raise ValueError(f"config key 'layer_types': expected {list(_ATTENTION)}, found {kind}")
        fixed = _ATTENTION[kind]
        ratios.append(rates[kind] if fixed is None else fixed)
    return [*ratios, *[0] * config.get("num_nextn_predict_layers", 0)]


def _num_hash_layers(config: Mapping[str, Any]) -> int:
    kinds = list(_need(config, "mlp_layer_types"))
    count = kinds.count("hash_moe")
    if kinds[:count] != ["hash_moe"] * count:
        raise ValueError(f"config key 'mlp_layer_types': expected hash layers first, found {kinds}")
    return count


def _rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """YaRN of the compressed layers; None where they have plain frequencies."""
    compress: Mapping[str, Any] = config.get("rope_parameters", {}).get("compress", {})
    return compress if compress.get("rope_type") == "yarn" else None


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype", "bfloat16"))


def _need(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"config key {key!r}: expected by transformers' layout, found no such key")
    return config[key]
