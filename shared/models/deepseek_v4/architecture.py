"""The shape of a DeepSeek-V4 model, read from a release ``config.json``; no torch.

Field names are the release's keys. A key that decides what the model computes is never defaulted:
every known wrong port of this model fell back to some code default (θ, YaRN, the ratio list).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

LayerKind = Literal["window", "c4", "pooled"]
WeightFormat = Literal["fp8", "fp4", "bf16", "fp32"]

C4_RATIO = 4  # the only ratio whose blocks overlap and whose entries an indexer selects
QUANT_BLOCK = 128  # rows and columns that share one FP8 scale
FP4_GROUP = 32  # values along K that share one FP4 scale


@dataclass(frozen=True, slots=True)
class Yarn:
    """``rope_scaling``: stretches the slow rotary frequencies of compressed layers."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise _error("rope_scaling.factor", "at least 1", self.factor)
        if (positions := self.original_max_position_embeddings) < 1:
            key = "rope_scaling.original_max_position_embeddings"
            raise _error(key, "at least 1", positions)
        if self.beta_slow <= 0:
            raise _error("rope_scaling.beta_slow", "more than 0", self.beta_slow)
        if self.beta_fast <= self.beta_slow:
            expected = f"more than beta_slow {self.beta_slow:g}"
            raise _error("rope_scaling.beta_fast", expected, self.beta_fast)


@dataclass(frozen=True, slots=True)
class Quantization:
    """``quantization_config``: only the release's own scheme exists, so only it is accepted."""

    quant_method: str = "fp8"
    fmt: str = "e4m3"
    activation_scheme: str = "dynamic"
    scale_fmt: str = "ue8m0"
    weight_block_size: tuple[int, ...] = (QUANT_BLOCK, QUANT_BLOCK)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One DeepSeek-V4 model; every mistake is a ValueError naming key, expected and found."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One per layer, then one per MTP block: 0 window only, 4 overlapping blocks with an indexer,
    any other power of two from 8 up plain pooled blocks."""
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn | None
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    num_hash_layers: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    num_key_value_heads: int = 1
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int = 0
    eos_token_id: int = 1
    clamp_shared_experts: bool = True
    """Sources disagree whether ``swiglu_limit`` binds the shared expert; both engines read this."""
    quantization_config: Quantization | None = None
    expert_dtype: str | None = None
    torch_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        _check_attention(self)
        _check_experts(self)
        _check_formats(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the release's keys; keys that do not change the model are ignored."""
        if not isinstance(config, Mapping):
            raise _no_object("config", config)
        _refuse_other_models(config)
        arch = cls(**dict(_read_keys(cls, config)))
        _check_derived(arch, config)
        return arch

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read ``config.json``, given its path or its directory's."""
        file = Path(path)
        return cls.from_config(read_config(file / "config.json" if file.is_dir() else file))

    def to_config(self) -> dict[str, Any]:
        """The config.json of this model: release keys, and what transformers cannot infer."""
        config: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **{key: _plain(value) for key, value in asdict(self).items()},
            **_transformers_keys(self),
        }
        if self.rope_scaling is not None:
            config["rope_scaling"] = {"type": "yarn", **config["rope_scaling"]}
        for key in ("quantization_config", "expert_dtype"):
            if config[key] is None:
                del config[key]
        return config

    def with_format(self, weight_format: WeightFormat) -> Self:
        """The same model with its weights stored in another format."""
        quantised = weight_format in ("fp8", "fp4")
        return replace(
            self,
            quantization_config=Quantization() if quantised else None,
            expert_dtype="fp4" if weight_format == "fp4" else None,
            torch_dtype="float32" if weight_format == "fp32" else "bfloat16",
        )

    @property
    def weight_format(self) -> WeightFormat:
        """How the big matrices are stored; ``fp4`` means FP4 experts, FP8 elsewhere."""
        if self.quantization_config is not None:
            return "fp4" if self.expert_dtype == "fp4" else "fp8"
        return "fp32" if self.torch_dtype == "float32" else "bf16"

    @property
    def nope_head_dim(self) -> int:
        """Leading dims of a head that carry no position."""
        return self.head_dim - self.qk_rope_head_dim

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of a layer; MTP block k is layer ``num_hidden_layers + k``."""
        ratio = self.compress_ratios[layer]
        return "window" if ratio == 0 else "c4" if ratio == C4_RATIO else "pooled"

    def is_hash_routed(self, layer: int) -> bool:
        """Whether experts come from the token id's row of ``tid2eid``."""
        return layer < self.num_hash_layers

    def rope_frequencies(self, layer: int) -> tuple[float, ...]:
        """Radians per position of each rotary pair, in double precision: round once, at use."""
        if self.compress_ratios[layer] == 0:
            return _plain_frequencies(self.rope_theta, self.qk_rope_head_dim)
        plain = _plain_frequencies(self.compress_rope_theta, self.qk_rope_head_dim)
        return plain if self.rope_scaling is None else _stretched(self, self.rope_scaling, plain)


def read_config(file: Path) -> Mapping[str, Any]:
    """A config.json, unread; ValueError names a file that is no JSON object."""
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as err:  # of JSON, of UTF-8, or nested without end
        raise ValueError(f"{file}: expected JSON, found none: {err}") from err
    if not isinstance(config, dict):
        raise _no_object(str(file), config)
    return config


def yarn_range(arch: Architecture, yarn: Yarn) -> tuple[int, int]:
    """First and last pair of the ramp between kept and slowed frequencies (15, 25 in Flash)."""
    dim, theta = arch.qk_rope_head_dim, arch.compress_rope_theta

    def pair_that_turns(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    return low, min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)


def _plain_frequencies(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-pair / dim) for pair in range(0, dim, 2))


def _stretched(arch: Architecture, yarn: Yarn, plain: tuple[float, ...]) -> tuple[float, ...]:
    # No magnitude factor anywhere: the release's attention does not use YaRN's 0.1·ln(s)+1.
    low, high = yarn_range(arch, yarn)
    width = max(high - low, 1e-3)
    ramps = (min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(plain)))
    return tuple(
        f * (1 - ramp) + f / yarn.factor * ramp for f, ramp in zip(plain, ramps, strict=True)
    )


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type", "deepseek_v4")
    if model_type != "deepseek_v4":
        raise _error("model_type", "'deepseek_v4'", model_type)
    if "dspark_block_size" in config:
        raise _error("dspark_block_size", "no such key", config["dspark_block_size"])


def _read_keys(cls: type, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in fields(cls):
        reader, expected = _READERS[field.type]
        if field.name in config:
            yield field.name, _read(field.name, config[field.name], reader, expected)
        elif field.default is MISSING:
            raise ValueError(f"config key {field.name!r}: expected {expected}, found no such key")


def _read(key: str, value: Any, reader: Callable[[Any], Any], expected: str) -> Any:
    try:
        return reader(value)
    except (TypeError, OverflowError):  # of an integer that no float can hold
        raise _error(key, expected, value) from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(_integer(item) for item in value)


def _yarn(value: Any) -> Yarn | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise _error("rope_scaling.type", "'yarn'", kind)
    parts = {}
    for field in fields(Yarn):
        key = f"rope_scaling.{field.name}"
        if field.name not in value:
            raise ValueError(f"config key {key!r}: expected a number, found no such key")
        reader, expected = _READERS[field.type]
        parts[field.name] = _read(key, value[field.name], reader, expected)
    for name, neutral in _YARN_NEUTRAL.items():
        if value.get(name) not in (None, neutral):
            expected = f"{neutral!r} or no such key: this model does not have it"
            raise _error(f"rope_scaling.{name}", expected, value[name])
    return Yarn(**parts)


def _quantization(value: Any) -> Quantization | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError
    for field in fields(Quantization):
        key = f"quantization_config.{field.name}"
        if field.name in _SAYS_FP8 and field.name not in value:
            expected = repr(field.default)
            raise ValueError(f"config key {key!r}: expected {expected}, found no such key")
        found = value.get(field.name, field.default)
        found = tuple(found) if isinstance(found, list) else found
        if found != field.default:
            raise _error(key, repr(field.default), found)
    return Quantization()


_SAYS_FP8 = (
    "quant_method",
    "weight_block_size",
)  # the rest of the scheme some repackages leave out
_YARN_NEUTRAL: dict[str, Any] = {
    "attention_factor": 1.0,
    "mscale": 0,
    "mscale_all_dim": 0,
    "truncate": True,
}
"""What other models' YaRN may have, by the value with which it does nothing."""
_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_integer, "an integer"),
    float: (_number, "a finite number"),
    bool: (_flag, "true or false"),
    str: (_text, "a string"),
    str | None: (_optional_text, "a string or null"),
    tuple[int, ...]: (_integers, "a list of integers"),
    Yarn | None: (_yarn, "an object or null"),
    Quantization | None: (_quantization, "an object or null"),
}
_LAYER_TYPES: dict[LayerKind, str] = {
    "window": "sliding_attention",
    "c4": "compressed_sparse_attention",
    "pooled": "heavily_compressed_attention",
}
"""transformers' names."""
_MAY_BE_ZERO = frozenset(
    ("num_nextn_predict_layers", "num_hash_layers", "bos_token_id", "eos_token_id")
)


_AT_MOST = {
    "num_hidden_layers": 1024,
    "num_nextn_predict_layers": 16,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "num_attention_heads": 4096,
    "index_n_heads": 4096,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
}
"""Four times any model of this kind and more; what every tensor of is named, or looped over."""
_SIZE_AT_MOST = 1 << 24  # of every other size
_TENSORS_AT_MOST = 1 << 20


def _most(key: str) -> int:
    return _AT_MOST.get(key, _SIZE_AT_MOST)


def _check_sizes(arch: Architecture) -> None:
    for field in fields(arch):
        value, least = getattr(arch, field.name), 0 if field.name in _MAY_BE_ZERO else 1
        if field.type is int and not least <= value <= (most := _most(field.name)):
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise _error(field.name, bound, value)
        if field.type is float and value <= 0:
            raise _error(field.name, "more than 0", value)
    experts = (arch.num_hidden_layers + arch.num_nextn_predict_layers) * arch.n_routed_experts
    if experts > _TENSORS_AT_MOST:
        raise _error("n_routed_experts of all layers", f"at most {_TENSORS_AT_MOST}", experts)
    for key in ("rope_theta", "compress_rope_theta"):
        if getattr(arch, key) <= 1:
            raise _error(key, "more than 1", getattr(arch, key))


def _check_layers(arch: Architecture) -> None:
    layers, mtp = arch.num_hidden_layers, arch.num_nextn_predict_layers
    if len(arch.compress_ratios) != layers + mtp:
        expected = f"{layers + mtp} entries (num_hidden_layers + num_nextn_predict_layers)"
        raise _error("compress_ratios", expected, f"{len(arch.compress_ratios)} entries")
    for i, ratio in enumerate(arch.compress_ratios):
        if ratio not in (0, C4_RATIO) and (ratio < 8 or ratio & (ratio - 1)):
            raise _error(f"compress_ratios[{i}]", "0, 4 or a power of two from 8 up", ratio)
        if i >= layers and ratio != 0:
            raise _error(f"compress_ratios[{i}]", "0 (an MTP block attends its window)", ratio)
    if arch.num_hash_layers > layers:
        raise _error("num_hash_layers", f"at most {layers}", arch.num_hash_layers)


def _check_attention(arch: Architecture) -> None:
    rope = arch.qk_rope_head_dim
    if arch.num_attention_heads % arch.o_groups:
        expected = f"a divisor of num_attention_heads {arch.num_attention_heads}"
        raise _error("o_groups", expected, arch.o_groups)
    if rope % 2 or not 2 <= rope < arch.head_dim:
        raise _error("qk_rope_head_dim", f"even, below head_dim {arch.head_dim}", rope)
    if arch.index_head_dim < rope or arch.index_head_dim & (arch.index_head_dim - 1):
        expected = f"a power of two, at least qk_rope_head_dim {rope}"
        raise _error("index_head_dim", expected, arch.index_head_dim)
    if arch.num_key_value_heads != 1:
        raise _error(
            "num_key_value_heads", "1 (one head is key and value)", arch.num_key_value_heads
        )
    if arch.hc_mult < 2:
        raise _error("hc_mult", "at least 2 streams", arch.hc_mult)


def _check_experts(arch: Architecture) -> None:
    if arch.num_experts_per_tok > arch.n_routed_experts:
        expected = f"at most n_routed_experts {arch.n_routed_experts}"
        raise _error("num_experts_per_tok", expected, arch.num_experts_per_tok)
    fixed: dict[str, str | int | bool] = {
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    for key, only in fixed.items():
        if getattr(arch, key) != only:
            raise _error(key, repr(only), getattr(arch, key))


def _check_formats(arch: Architecture) -> None:
    if arch.expert_dtype not in (None, "fp8", "fp4"):
        raise _error("expert_dtype", "'fp8', 'fp4' or null", arch.expert_dtype)
    if arch.torch_dtype not in ("bfloat16", "float32"):
        raise _error("torch_dtype", "'bfloat16' or 'float32'", arch.torch_dtype)
    if arch.expert_dtype == "fp4":
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(arch, key) % FP4_GROUP:
                raise _error(key, f"a multiple of {FP4_GROUP} for FP4", getattr(arch, key))


def _check_derived(arch: Architecture, config: Mapping[str, Any]) -> None:
    """What transformers derives from the ratios, and reads first, must not say something else."""
    types, rates = config.get("layer_types"), config.get("compress_rates")
    kinds = [_LAYER_TYPES[arch.kind(layer)] for layer in range(arch.num_hidden_layers)]
    if types is not None and not isinstance(types, list | tuple):
        raise _error("layer_types", "a list", types)
    if types is not None and len(types) != len(kinds):
        raise _error("layer_types", f"{len(kinds)} entries", f"{len(types)} entries")
    if rates is not None and not isinstance(rates, Mapping):
        raise _error("compress_rates", "an object", rates)
    for i, (kind, ratio) in enumerate(zip(kinds, arch.compress_ratios, strict=False)):
        where = f"(compress_ratios[{i}] is {ratio})"
        if types is not None and types[i] != kind:
            raise _error(f"layer_types[{i}]", f"{kind!r} {where}", types[i])
        if rates is not None and rates.get(kind, ratio) != ratio:
            raise _error(f"compress_rates.{kind}", f"{ratio} {where}", rates[kind])


def _transformers_keys(arch: Architecture) -> dict[str, Any]:
    # transformers infers these from compress_ratios only if every pooled ratio is 128, and has
    # room for one pooled ratio.
    pooled = {ratio for ratio in arch.compress_ratios if ratio not in (0, C4_RATIO)}
    if len(pooled) > 1:
        return {}
    rates = {
        _LAYER_TYPES["c4"]: C4_RATIO,
        _LAYER_TYPES["pooled"]: min(pooled, default=QUANT_BLOCK),
    }
    return {
        "layer_types": [_LAYER_TYPES[arch.kind(layer)] for layer in range(arch.num_hidden_layers)],
        "compress_rates": rates,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _error(key: str, expected: str, found: Any) -> ValueError:
    return ValueError(f"config key {key!r}: expected {expected}, found {found!r}")


def _no_object(where: str, found: object) -> ValueError:
    return ValueError(f"{where}: expected an object, found a {type(found).__name__}")
