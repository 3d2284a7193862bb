import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from services.rollout.engine.sglang.buckets import unit_of
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import (
    BLOCK_NAMES,
    BLOCK_SHAPES,
    MODEL_NAMES,
    MODEL_SHAPES,
    MTP_NAMES,
    MTP_SHAPES,
    Place,
    TensorSpec,
    fused_partner,
    inverse,
    places,
    tensor_specs,
    weight_shapes,
)
from shared.models.deepseek_v4.runtimes import from_runtime, to_runtime
from shared.quant.policy import POLICIES, WEIGHT_CLASSES, format_of, scale_name, weight_class
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, FLASH, SMALL, random_weights

RUNTIMES = ["transformers", "megatron", "sglang"]


@cache
def flash_specs() -> dict[str, TensorSpec]:
    return tensor_specs(FLASH)


@cache
def flash_places(runtime: Any) -> dict[str, Place]:
    return places(FLASH, runtime)


def test_flash_has_the_published_number_of_tensors() -> None:
    specs = flash_specs()
    assert len(specs) == 69187
    assert sum(name.startswith("mtp.") for name in specs) == 1575
    assert len(tensor_specs(FLASH.with_format("fp8"))) == 69187
    assert len(weight_shapes(FLASH)) == sum(not spec.is_scale for spec in specs.values())


PUBLISHED = {
    "embed.weight": ("BF16", (129280, 4096)),
    "hc_head_fn": ("F32", (4, 16384)),
    "layers.0.hc_attn_fn": ("F32", (24, 16384)),
    "layers.0.hc_ffn_scale": ("F32", (3,)),
    "layers.0.attn.wq_a.weight": ("F8_E4M3", (1024, 4096)),
    "layers.0.attn.wq_a.scale": ("F8_E8M0", (8, 32)),
    "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1024)),
    "layers.0.attn.wq_b.scale": ("F8_E8M0", (256, 8)),
    "layers.0.attn.wkv.scale": ("F8_E8M0", (4, 32)),
    "layers.0.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
    "layers.0.attn.wo_b.scale": ("F8_E8M0", (32, 64)),
    "layers.0.attn.attn_sink": ("F32", (64,)),
    "layers.0.ffn.gate.tid2eid": ("I64", (129280, 6)),
    "layers.2.attn.compressor.wkv.weight": ("BF16", (1024, 4096)),
    "layers.2.attn.compressor.ape": ("F32", (4, 1024)),
    "layers.3.attn.compressor.wgate.weight": ("BF16", (512, 4096)),
    "layers.3.attn.compressor.ape": ("F32", (128, 512)),
    "layers.2.attn.indexer.wq_b.weight": ("F8_E4M3", (8192, 1024)),
    "layers.2.attn.indexer.wq_b.scale": ("F8_E8M0", (64, 8)),
    "layers.2.attn.indexer.weights_proj.weight": ("BF16", (64, 4096)),
    "layers.2.attn.indexer.compressor.wgate.weight": ("BF16", (256, 4096)),
    "layers.2.attn.indexer.compressor.ape": ("F32", (4, 256)),
    "layers.2.attn.indexer.compressor.norm.weight": ("BF16", (128,)),
    "layers.3.ffn.gate.weight": ("BF16", (256, 4096)),
    "layers.3.ffn.gate.bias": ("F32", (256,)),
    "layers.42.ffn.experts.255.w1.weight": ("I8", (2048, 2048)),
    "layers.42.ffn.experts.255.w1.scale": ("F8_E8M0", (2048, 128)),
    "layers.42.ffn.experts.0.w2.weight": ("I8", (4096, 1024)),
    "layers.42.ffn.experts.0.w2.scale": ("F8_E8M0", (4096, 64)),
    "layers.0.ffn.shared_experts.w2.weight": ("F8_E4M3", (4096, 2048)),
    "layers.0.ffn.shared_experts.w2.scale": ("F8_E8M0", (32, 16)),
    "mtp.0.e_proj.weight": ("F8_E4M3", (4096, 4096)),
    "mtp.0.hc_head_scale": ("F32", (1,)),
    "mtp.0.ffn.gate.bias": ("F32", (256,)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flash_tensor_has_the_published_dtype_and_shape(name: str) -> None:
    spec = flash_specs()[name]
    assert (spec.dtype, spec.shape) == PUBLISHED[name]


def test_fp8_release_keeps_experts_in_blocks() -> None:
    specs = tensor_specs(FLASH.with_format("fp8"))
    assert specs["layers.9.ffn.experts.7.w1.weight"].dtype == "F8_E4M3"
    assert specs["layers.9.ffn.experts.7.w1.scale"].shape == (16, 32)
    assert specs["layers.9.ffn.experts.7.w2.scale"].shape == (32, 16)


def test_absent_where_the_layer_kind_has_none() -> None:
    names = flash_specs()
    assert "layers.2.ffn.gate.bias" not in names
    assert "layers.3.ffn.gate.tid2eid" not in names
    assert "layers.1.attn.compressor.ape" not in names
    assert "layers.3.attn.indexer.wq_b.weight" not in names
    assert "mtp.0.head.weight" not in names


def test_partial_blocks_count_as_blocks() -> None:
    specs = tensor_specs(DEMO.with_format("fp8"))
    assert specs["layers.0.attn.wkv.weight"].shape == (64, 128)
    assert specs["layers.0.attn.wkv.scale"].shape == (1, 1)


def test_every_table_lists_the_same_tensors() -> None:
    assert MODEL_NAMES.keys() == MODEL_SHAPES.keys()
    assert BLOCK_NAMES.keys() == BLOCK_SHAPES.keys()
    assert MTP_NAMES.keys() == MTP_SHAPES.keys()
    assert WEIGHT_CLASSES.keys() == MODEL_SHAPES.keys() | BLOCK_SHAPES.keys() | MTP_SHAPES.keys()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("arch", [FLASH, SMALL], ids=["flash", "small"])
def test_places_have_an_inverse(arch: Architecture, runtime: Any) -> None:
    table = flash_places(runtime) if arch is FLASH else places(arch, runtime)
    back = inverse(table)
    assert len(back) == len(table)
    assert all(back[place] == name for name, place in table.items())
    missing = weight_shapes(arch).keys() - table.keys()
    assert all(name.startswith("mtp.") and runtime == "transformers" for name in missing)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_fused_parts_are_complete(runtime: Any) -> None:
    rows = Counter()
    for place in places(ALIGNED, runtime).values():
        if place.row is not None:
            rows[place.name, place.expert] += 1
    assert rows
    assert set(rows.values()) == {2}


PLACES: dict[Any, dict[str, str]] = {
    "transformers": {
        "layers.3.attn.wq_a.weight": "model.layers.3.self_attn.q_a_proj.weight",
        "layers.3.attn.wq_a.scale": "model.layers.3.self_attn.q_a_proj.weight_scale_inv",
    },
    "megatron": {
        "layers.3.attn.wo_b.weight": "layers.3.attn.wo_b.weight",
        "layers.3.hc_ffn_scale": "layers.3.hc_ffn.scale",
        "mtp.0.hc_head_fn": "mtp.0.hc_head.fn",
    },
    "sglang": {
        "layers.2.ffn.gate.tid2eid": "model.layers.2.mlp.topk.tid2eid",
        "mtp.0.norm.weight": "model.layers.43.shared_head.norm.weight",
    },
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_known_places(runtime: Any) -> None:
    table = flash_places(runtime)
    for name, expected in PLACES[runtime].items():
        assert table[name] == Place(expected)


def test_known_fused_places() -> None:
    sglang = flash_places("sglang")
    assert sglang["layers.0.attn.wkv.weight"] == Place(
        "model.layers.0.self_attn.wqkv_a.weight", None, 1
    )
    assert sglang["layers.4.ffn.experts.9.w3.scale"] == Place(
        "model.layers.4.mlp.experts.w13_weight_scale_inv", 9, 1
    )
    assert flash_places("megatron")["layers.4.ffn.experts.9.w3.weight"] == Place(
        "layers.4.ffn.experts.w13", 9, 1
    )


def test_what_sglang_fuses_is_a_pair_that_is_handed_over_in_one_bucket() -> None:
    """Its loader joins the halves of a matrix only if one call brings both."""
    matrices: dict[tuple[str, int | None], list[str]] = {}
    for name, place in flash_places("sglang").items():
        if place.row is None:
            assert fused_partner(name) is None, name
        else:
            matrices.setdefault((place.name, place.expert), []).append(name)
    assert len(matrices) > 22_000
    for one, other in matrices.values():
        assert unit_of(one) == unit_of(other)
        if not one.endswith(".scale"):
            assert (fused_partner(one), fused_partner(other)) == (other, one)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_weights_survive_a_runtime_layout(runtime: Any) -> None:
    weights = random_weights(SMALL, seed=0)
    back = from_runtime(to_runtime(weights, SMALL, runtime), SMALL, runtime)
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(back[name], weight), name


def test_sglang_stacks_gate_rows_before_up_rows() -> None:
    weights = random_weights(SMALL, seed=0)
    stacked = to_runtime(weights, SMALL, "sglang")["model.layers.4.mlp.experts.w13_weight"]
    assert stacked.shape == (8, 64, 64)
    assert torch.equal(stacked[5, :32], weights["layers.4.ffn.experts.5.w1.weight"])
    assert torch.equal(stacked[5, 32:], weights["layers.4.ffn.experts.5.w3.weight"])


def test_policy_knows_every_tensor_and_nothing_else() -> None:
    policy = POLICIES["fp4"]
    formats = Counter(format_of(name, policy) for name in weight_shapes(FLASH))
    assert formats["fp4"] == 44 * 256 * 3
    assert formats["fp8"] == 44 * (5 + 3) + 21 + 2
    assert formats["int64"] == 3
    with pytest.raises(KeyError, match=re.escape("layers.0.attn.wq_c.weight")):
        weight_class("layers.0.attn.wq_c.weight")
    with pytest.raises(ValueError, match="attn_sink"):
        scale_name("layers.0.attn.attn_sink")
