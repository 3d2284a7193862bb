"""The sampler's own layout of DeepSeek-V4 weights, derived from the canonical tensors of a release.

Canonical tensors are codes and scales as published; derived ones are what the kernels read: values
fused by common input, stacked experts, position biases in cache order, copied sinks. Every derived
tensor can be taken apart again, so what is effective can be compared with what was published. An
update derives all of it anew, once: nothing here is ever patched.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.published import Canonical, dequantised, published_names

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a release tensor."""

    name: str
    start: int
    stop: int


Fusion = tuple[Segment, ...]


@dataclass(slots=True)
class Mix:
    """One hyper-connection mapping, columns are tokens: m = fn · flat(h), then scale and base."""

    fn: Tensor  # [M, S·D]
    scale: Tensor  # [M, 1]
    base: Tensor  # [M, 1]


@dataclass(slots=True)
class Compressor:
    """Everything that forms compressed entries, main and indexer fused by column."""

    inputs: Tensor  # [columns (+ index heads), D]: keys and gates of both halves, indexer weights
    ape: Tensor  # [ring rows, columns]: added to what inputs gives; zero under the keys
    norm: Tensor  # [K]
    index_norm: Tensor | None  # [I]


@dataclass(slots=True)
class Block:
    """One layer. Matrices are [out, in]; `q_up` carries the indexer's queries below the main."""

    attn_mix: Mix
    attn_norm: Tensor
    qkv_down: Tensor  # [Q + K, D]
    q_norm: Tensor
    kv_norm: Tensor
    q_up: Tensor  # [H·K (+ N·I), Q]
    sink: Tensor  # [H]
    out_groups: Tensor  # [G, H·K / G, R]
    out: Tensor  # [D, G·R]
    compressor: Compressor | None
    ffn_mix: Mix
    ffn_norm: Tensor
    gate: Tensor  # [E, D]
    gate_bias: Tensor | None  # [E]
    token_experts: Tensor | None  # int64 [V, k]
    experts_in: Tensor  # [E + 1, 2·F, D]: gate rows, then up rows; the shared expert is the last
    experts_out: Tensor  # [E + 1, D, F]


@dataclass(slots=True)
class Derived:
    """All derived state of one version, in one compute dtype."""

    embed: Tensor  # [V, D]
    blocks: list[Block]
    head_mix: Mix
    norm: Tensor
    head: Tensor  # [V, D]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in _tensors_in(self))


def derive(
    arch: Architecture,
    canonical: Canonical,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Derived:
    """Build every derived tensor of one version. Peak memory: the result and one layer's values."""

    def value(name: str) -> Tensor:
        stored = canonical[name]
        tensor = dequantised(canonical, name).to(device)
        tensor = tensor if tensor.dtype == torch.int64 else tensor.to(dtype)
        # What needed no conversion must not go on living in the staged files.
        return tensor.clone() if tensor.data_ptr() == stored.data_ptr() else tensor

    return Derived(
        embed=value("embed.weight"),
        blocks=[_block(arch, layer, value) for layer in range(arch.num_hidden_layers)],
        head_mix=_mix(value, "hc_head_", [arch.hc_mult]),
        norm=value("norm.weight"),
        head=value("head.weight"),
    )


def effective(arch: Architecture, derived: Derived) -> Iterator[tuple[str, Tensor]]:
    """Take derived state apart: (release name, FP32 or int64 values) sorted by name.

    WeightsCorrupt names a tensor that lies in several copies which are not alike. MTP blocks are
    not sampled with, so they have no derived state and do not appear.
    """
    owners = {f"layers.{i}.": (i, block) for i, block in enumerate(derived.blocks)}
    parts: dict[str, Tensor] = {}
    for prefix, (layer, block) in owners.items():
        parts |= {prefix + tail: value for tail, value in _block_parts(arch, layer, block)}
    parts |= _mix_parts("hc_head_", derived.head_mix, [arch.hc_mult])
    parts |= {
        "embed.weight": derived.embed,
        "norm.weight": derived.norm,
        "head.weight": derived.head,
    }
    for name in sorted(parts):
        value = parts[name]
        yield name, value if value.dtype == torch.int64 else value.float()


def published(arch: Architecture, canonical: Canonical) -> Iterator[tuple[str, Tensor]]:
    """What `effective` must give for these canonical tensors."""
    for name in published_names(arch):
        yield name, dequantised(canonical, name)


def ring_rows(arch: Architecture, layer: int) -> int:
    """Rows that a compressor keeps per sequence: the open block, and with overlap the last one."""
    ratio = arch.compress_ratios[layer]
    return 2 * ratio if arch.kind(layer) == "c4" else ratio


def ring_columns(arch: Architecture, layer: int) -> int:
    """Keys and gates of all halves, main and indexer."""
    if arch.kind(layer) == "c4":
        return 4 * (arch.head_dim + arch.index_head_dim)
    return 2 * arch.head_dim


def _block(arch: Architecture, layer: int, value: Read) -> Block:
    def part(tail: str) -> Tensor:
        return value(f"layers.{layer}.{tail}")

    sizes = [arch.hc_mult, arch.hc_mult, arch.hc_mult**2]
    groups, rank = arch.o_groups, arch.o_lora_rank
    learned = not arch.is_hash_routed(layer)
    compressed = arch.kind(layer) != "window"
    return Block(
        attn_mix=_mix(part, "hc_attn_", sizes),
        attn_norm=part("attn_norm.weight"),
        qkv_down=_fuse(_qkv_fusion(arch), part),
        q_norm=part("attn.q_norm.weight"),
        kv_norm=part("attn.kv_norm.weight"),
        q_up=_fuse(_q_up_fusion(arch, layer), part),
        sink=part("attn.attn_sink").clone(),
        out_groups=part("attn.wo_a.weight").view(groups, rank, -1).transpose(1, 2).contiguous(),
        out=part("attn.wo_b.weight"),
        compressor=_compressor(arch, layer, part) if compressed else None,
        ffn_mix=_mix(part, "hc_ffn_", sizes),
        ffn_norm=part("ffn_norm.weight"),
        gate=part("ffn.gate.weight"),
        gate_bias=part("ffn.gate.bias") if learned else None,
        token_experts=None if learned else part("ffn.gate.tid2eid"),
        experts_in=torch.stack(
            [torch.cat((part(f"{e}.w1.weight"), part(f"{e}.w3.weight"))) for e in _experts(arch)]
        ),
        experts_out=torch.stack([part(f"{e}.w2.weight") for e in _experts(arch)]),
    )


def _block_parts(arch: Architecture, layer: int, block: Block) -> Iterator[tuple[str, Tensor]]:
    sizes = [arch.hc_mult, arch.hc_mult, arch.hc_mult**2]
    for stem, mix in (("hc_attn_", block.attn_mix), ("hc_ffn_", block.ffn_mix)):
        yield from _mix_parts(stem, mix, sizes, owner=f"layers.{layer}.").items()
    yield "attn_norm.weight", block.attn_norm
    yield "ffn_norm.weight", block.ffn_norm
    yield "attn.q_norm.weight", block.q_norm
    yield "attn.kv_norm.weight", block.kv_norm
    yield from _split(_qkv_fusion(arch), block.qkv_down).items()
    yield from _split(_q_up_fusion(arch, layer), block.q_up).items()
    yield "attn.attn_sink", block.sink
    yield "attn.wo_a.weight", block.out_groups.transpose(1, 2).flatten(0, 1)
    yield "attn.wo_b.weight", block.out
    if block.compressor is not None:
        yield from _compressor_parts(arch, layer, block.compressor)
    yield "ffn.gate.weight", block.gate
    if block.gate_bias is not None:
        yield "ffn.gate.bias", block.gate_bias
    if block.token_experts is not None:
        yield "ffn.gate.tid2eid", block.token_experts
    inner = arch.moe_intermediate_size
    for index, expert in enumerate(_experts(arch)):
        yield f"{expert}.w1.weight", block.experts_in[index, :inner]
        yield f"{expert}.w3.weight", block.experts_in[index, inner:]
        yield f"{expert}.w2.weight", block.experts_out[index]


def _experts(arch: Architecture) -> list[str]:
    routed = [f"ffn.experts.{index}" for index in range(arch.n_routed_experts)]
    return [*routed, "ffn.shared_experts"]


def _mix(value: Read, stem: str, sizes: list[int]) -> Mix:
    repeats = torch.tensor(sizes, device=value(stem + "scale").device)
    scale = value(stem + "scale").repeat_interleave(repeats)
    return Mix(value(stem + "fn"), scale[:, None].contiguous(), value(stem + "base")[:, None])


def _mix_parts(stem: str, mix: Mix, sizes: list[int], *, owner: str = "") -> dict[str, Tensor]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    scale = mix.scale[firsts, 0]
    repeats = torch.tensor(sizes, device=scale.device)
    _check_copies(f"{owner}{stem}scale", mix.scale[:, 0], scale.repeat_interleave(repeats))
    return {f"{stem}fn": mix.fn, f"{stem}base": mix.base[:, 0], f"{stem}scale": scale}


def _check_copies(name: str, found: Tensor, expected: Tensor) -> None:
    """A kernel may read any of the copies, so one that is stale must not pass."""
    if not torch.equal(found, expected):
        raise WeightsCorrupt(f"{name}: its copies in the derived state are not alike")


def _qkv_fusion(arch: Architecture) -> Fusion:
    return (
        Segment("attn.wq_a.weight", 0, arch.q_lora_rank),
        Segment("attn.wkv.weight", 0, arch.head_dim),
    )


def _q_up_fusion(arch: Architecture, layer: int) -> Fusion:
    main = Segment("attn.wq_b.weight", 0, arch.num_attention_heads * arch.head_dim)
    if arch.kind(layer) != "c4":
        return (main,)
    rows = arch.index_n_heads * arch.index_head_dim
    return (main, Segment("attn.indexer.wq_b.weight", 0, rows))


def _input_fusion(arch: Architecture, layer: int) -> Fusion:
    """Order of a ring row: per half (a, then b) keys, then gates; main before indexer."""
    main, index = "attn.compressor", "attn.indexer.compressor"
    if arch.kind(layer) != "c4":
        size = arch.head_dim
        return (
            Segment(f"{main}.wkv.weight", 0, size),
            Segment(f"{main}.wgate.weight", 0, size),
        )
    segments = [
        Segment(f"{owner}.{what}.weight", half * size, (half + 1) * size)
        for half in (0, 1)
        for what in ("wkv", "wgate")
        for owner, size in ((main, arch.head_dim), (index, arch.index_head_dim))
    ]
    return (*segments, Segment("attn.indexer.weights_proj.weight", 0, arch.index_n_heads))


def _compressor(arch: Architecture, layer: int, part: Read) -> Compressor:
    columns = []
    ratio = arch.compress_ratios[layer]
    for segment in _input_fusion(arch, layer):
        owner, _, what = segment.name.removesuffix(".weight").rpartition(".")
        if what == "wgate":
            columns.append(part(f"{owner}.ape")[:, segment.start : segment.stop])
        elif what == "wkv":
            template = part(f"{owner}.ape")
            columns.append(template.new_zeros(ratio, segment.stop - segment.start))
    return Compressor(
        inputs=_fuse(_input_fusion(arch, layer), part),
        ape=torch.cat(columns, dim=1).repeat(ring_rows(arch, layer) // ratio, 1),
        norm=part("attn.compressor.norm.weight"),
        index_norm=(
            part("attn.indexer.compressor.norm.weight") if arch.kind(layer) == "c4" else None
        ),
    )


def _compressor_parts(
    arch: Architecture, layer: int, compressor: Compressor
) -> Iterator[tuple[str, Tensor]]:
    fusion = _input_fusion(arch, layer)
    yield from _split(fusion, compressor.inputs).items()
    yield "attn.compressor.norm.weight", compressor.norm
    if compressor.index_norm is not None:
        yield "attn.indexer.compressor.norm.weight", compressor.index_norm
    ratio = arch.compress_ratios[layer]
    ape, name = compressor.ape[:ratio], f"layers.{layer}.attn.compressor.ape"
    _check_copies(name, compressor.ape, ape.repeat(ring_rows(arch, layer) // ratio, 1))
    halves: dict[str, list[Tensor]] = {}
    for segment, columns in zip(fusion, _spans(fusion, ape.shape[1]), strict=False):
        owner, _, what = segment.name.removesuffix(".weight").rpartition(".")
        if what == "wgate":
            halves.setdefault(f"{owner}.ape", []).append(ape[:, columns])
        else:  # nothing is added to keys
            _check_copies(name, ape[:, columns], torch.zeros_like(ape[:, columns]))
    for name, parts in halves.items():
        yield name, torch.cat(parts, dim=1)


def _fuse(fusion: Fusion, part: Read) -> Tensor:
    return torch.cat([part(s.name)[s.start : s.stop] for s in fusion])


def _split(fusion: Fusion, fused: Tensor) -> dict[str, Tensor]:
    """The inverse of `_fuse`. Halves of one tensor are met in order of their rows."""
    parts: dict[str, list[Tensor]] = {}
    for segment, rows in zip(fusion, _spans(fusion, fused.shape[0]), strict=True):
        parts.setdefault(segment.name, []).append(fused[rows])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _spans(fusion: Fusion, limit: int) -> Iterator[slice]:
    offset = 0
    for segment in fusion:
        size = segment.stop - segment.start
        if offset + size > limit:
            return
        yield slice(offset, offset + size)
        offset += size


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Derived | Block | Mix | Compressor):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
