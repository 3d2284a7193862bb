"""Mistakes in number formats, planted in the sampler alone or in the code that both engines share.

Where both sides share the mistake no comparison of the two can see it: then the slow twins must,
which are written from the formats' definitions.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from services.rollout.models import deepseek_v4 as sampler_model
from services.rollout.models import deepseek_v4_weights as sampler_weights
from shared.models.deepseek_v4 import checkpoint
from shared.quant import activation, fp4, fp8
from shared.quant.activation import RELEASE, fake_e2m1, fake_e4m3, hadamard
from shared.quant.policy import scale_name
from tests.parity.engines import LENGTH
from tests.tiny_deepseek_v4 import ALIGNED, random_tokens, random_weights
from tests.unit.shared.quant.twins import E2M1_POSITIVE, E4M3_POSITIVE, rounded_group

ARCH = ALIGNED.with_format("fp4")
QUANT = RELEASE
TOKENS = random_tokens(ARCH, rows=1, length=LENGTH)

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class FormatMutation:
    """`at` is what the walk must say of a sampler with the mistake."""

    at: str
    in_sampler: Plant
    in_shared: Plant
    is_of_writer: bool = False
    """Whether it is made when weights are stored: then the sampler gets wrongly stored ones."""

    @contextmanager
    def planted(self, plant: Plant) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            yield


def values() -> dict[str, Tensor]:
    """Some channels are 2^-14 as large as their neighbours: without them powers of two as scales
    hide a wrong group size, because nothing underflows."""
    weights = random_weights(ARCH, seed=5)
    for name, weight in weights.items():
        if name.endswith(("attn_norm.weight", "ffn_norm.weight", ".q_norm.weight")):
            weight[64:128] *= 2.0**-14
        if name.endswith("attn.kv_norm.weight"):
            weight[:64] *= 2.0**-14
    return weights


# ------------------------------------------------------------------ reading weights


def _read_wrongly(change: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def wrong(canonical: Mapping[str, Tensor], name: str) -> Tensor:
            scale = canonical.get(scale_name(name)) if name.endswith(".weight") else None
            tensor, scale = change(canonical[name], scale)
            return checkpoint.dequantise_tensor(name, tensor, scale=scale)

        patch.setattr(sampler_weights, "dequantised", wrong)

    return plant


def _as_number(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).float() if scale.dtype == torch.float8_e8m0fnu else scale


def _shared_scales_as_numbers(patch: pytest.MonkeyPatch) -> None:
    for module in (fp8, fp4):
        patch.setattr(module, "scale_values", lambda scale, *, name="": _as_number(scale))


def _scale_by_substring(patch: pytest.MonkeyPatch) -> None:
    """Of all experts of a layer the first scale is taken whose name has the matrix's in it."""

    def wrong(canonical: Mapping[str, Tensor], name: str) -> Tensor:
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        layer = owner.partition("experts.")[0]
        scale = f"{owner}.{leaf}.scale"
        if ".ffn.experts." in name:
            scale = next(n for n in canonical if n.startswith(layer) and f".{leaf}.scale" in n)
        return checkpoint.dequantise_tensor(name, canonical[name], scale=canonical.get(scale))

    patch.setattr(sampler_weights, "dequantised", wrong)


def _shared_scale_by_substring(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint.scale_name

    def wrong(name: str) -> str:
        return right(re.sub(r"experts\.\d+", "experts.0", name))

    patch.setattr(checkpoint, "scale_name", wrong)


def _swapped(tensor: Tensor) -> Tensor:
    """Of packed FP4 bytes; other tensors are left alone."""
    if tensor.dtype not in (torch.int8, torch.uint8):
        return tensor
    raw = tensor.view(torch.uint8)
    return ((raw << 4) | (raw >> 4)).view(tensor.dtype)


def _shared_nibbles_swapped(patch: pytest.MonkeyPatch) -> None:
    right = fp4.e2m1_values
    patch.setattr(fp4, "e2m1_values", lambda packed: right(_swapped(packed)))


# ------------------------------------------------------------------ writing weights


def _scale_rounded_last(patch: pytest.MonkeyPatch) -> None:
    """Codes are made with amax / 448 and the scale is rounded up afterwards."""

    def wrong(weight: Tensor, *, name: str = "", scale_dtype: torch.dtype) -> tuple[Any, Any]:
        blocks = fp8._as_blocks(weight.float())
        peak = blocks.abs().amax((1, 3))
        exact = torch.where(peak > 0, peak / fp8.E4M3_MAX, 1.0)
        codes = (blocks / exact[:, None, :, None]).to(torch.float8_e4m3fn)
        scale = fp8.power_of_two(fp8.e4m3_exponent(peak)).to(scale_dtype)
        return fp8._from_blocks(codes, weight.shape), scale

    patch.setattr(checkpoint, "quantise_fp8", wrong)


# ------------------------------------------------------------------ rounding activations


def _rounds(name: str, wrong: Callable[..., Tensor]) -> Plant:
    return lambda patch: patch.setattr(sampler_model, name, wrong)


def _group(name: str, size: int) -> Plant:
    return lambda patch: patch.setattr(activation, name, size)


FORMAT_MUTATIONS: dict[str, FormatMutation] = {
    "E8M0 read as a number": FormatMutation(
        "layer 0 · query projection and RoPE",
        _read_wrongly(lambda tensor, scale: (tensor, None if scale is None else _as_number(scale))),
        _shared_scales_as_numbers,
    ),
    "nibbles swapped": FormatMutation(
        "layer 0 · routed experts",
        _read_wrongly(lambda tensor, scale: (_swapped(tensor), scale)),
        _shared_nibbles_swapped,
    ),
    "scale rounded after quantising": FormatMutation(
        "layer 0 · query projection and RoPE",
        _scale_rounded_last,
        _scale_rounded_last,
        is_of_writer=True,
    ),
    "scale of the first expert": FormatMutation(
        "layer 0 · routed experts", _scale_by_substring, _shared_scale_by_substring
    ),
    "linear input in groups of 64": FormatMutation(
        "layer 0 · query projection and RoPE",
        _rounds("round_linear_input", lambda x: fake_e4m3(x, group=64)),
        _group("LINEAR_GROUP", 64),
    ),
    "keys in groups of 128": FormatMutation(
        "layer 0 · key projection and RoPE",
        _rounds("round_kv", lambda x: fake_e4m3(x, group=128)),
        _group("KV_GROUP", 128),
    ),
    "indexer in groups of 64": FormatMutation(
        "layer 1 · indexer",
        _rounds("round_indexer", lambda x, *, form: fake_e2m1(hadamard(x), group=64)),
        _group("INDEXER_FP4_GROUP", 64),
    ),
}


# ------------------------------------------------------------------ the slow twins as a check


def formats_depart() -> float:
    """Largest difference between shared/quant and its twins, as a share of the largest value."""
    return max(_weights_depart(), _activations_depart(), _bytes_depart(), _experts_depart())


def _weights_depart() -> float:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 1.7
    rows = weight[:, :128][::31, ::13], weight[:, 128:][::31, ::13]
    peaks = weight[:, :128].abs().max().item(), weight[:, 128:].abs().max().item()
    values = _through(weight, "layers.0.attn.wq_b.weight")
    parts = values[:, :128][::31, ::13], values[:, 128:][::31, ::13]
    slow = [
        torch.tensor(rounded_group(part.flatten().tolist(), 448, E4M3_POSITIVE, peak))
        for part, peak in zip(rows, peaks, strict=True)
    ]
    found = [part.flatten() for part in parts]
    eights = _share(torch.cat(found), torch.cat(slow))

    values = _through(weight[:2], "layers.0.ffn.experts.0.w1.weight").view(-1, 32)
    groups = weight[:2].reshape(-1, 32).tolist()
    fours = [rounded_group(g, 6, E2M1_POSITIVE, max(map(abs, g))) for g in groups]
    return max(eights, _share(values, torch.tensor(fours)))


def _through(weight: Tensor, name: str) -> Tensor:
    policy = checkpoint.POLICIES["fp4"]
    pieces = checkpoint.quantise_tensor(name, weight, policy=policy)
    codes, scale = pieces.values()
    return checkpoint.dequantise_tensor(name, codes, scale=scale)


def _bytes_depart() -> float:
    """By hand: low nibble first, code = sign · 8 + index, E8M0 byte b is 2^(b - 127)."""
    packed = torch.tensor([[0x17, 0x9F] * 8], dtype=torch.uint8)
    scale = torch.tensor([[125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    by_hand = torch.tensor([[6.0, 0.5, -6.0, -0.5] * 8]) / 4
    four = _share(fp4.dequantise_fp4(packed, scale), by_hand)
    codes = torch.full((2, 2), 0x3C, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.5
    return max(four, _share(fp8.dequantise_fp8(codes, scale), torch.full((2, 2), 1.5 / 4)))


def _experts_depart() -> float:
    """Two experts with scales of their own, in one checkpoint."""
    ones = torch.full((1, 16), 0x22, dtype=torch.uint8)  # two codes of 1 in a byte
    stored: dict[str, Tensor] = {}
    for expert in range(2):
        name = f"layers.0.ffn.experts.{expert}.w1"
        scale = torch.tensor([[127 + expert]], dtype=torch.uint8)
        stored[f"{name}.weight"] = ones.view(torch.int8)
        stored[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
    values = checkpoint.dequantised(stored)
    found = torch.stack([values[f"layers.0.ffn.experts.{e}.w1.weight"][0, 0] for e in range(2)])
    return _share(found, torch.tensor([1.0, 2.0]))


def _activations_depart() -> float:
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(3))
    x[:, 64:128] *= 2.0**-14
    turned = hadamard(x)
    return max(
        _share(activation.quantise_linear_input(x), _slow(x, 128, 448, E4M3_POSITIVE)),
        _share(activation.quantise_kv(x), _slow(x, 64, 448, E4M3_POSITIVE)),
        _share(activation.quantise_indexer(x, form="fp4"), _slow(turned, 32, 6, E2M1_POSITIVE)),
    )


def _slow(x: Tensor, group: int, largest: int, grid: list[Any]) -> Tensor:
    groups = x.reshape(-1, group).tolist()
    rounded = [rounded_group(g, largest, grid, max(map(abs, g))) for g in groups]
    return torch.tensor(rounded).view_as(x)


def _share(ours: Tensor, slow: Tensor) -> float:
    """Element by element: what is small in its group must be right, too."""
    return float(((ours - slow).abs() / slow.abs().clamp(min=1e-12)).max())
