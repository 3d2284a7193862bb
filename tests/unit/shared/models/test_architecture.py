import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.models.deepseek_v4.architecture import Architecture, yarn_range
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, FLASH, SMALL, UNSCALED


@pytest.mark.parametrize("weight_format", ["fp8", "fp4", "bf16", "fp32"])
@pytest.mark.parametrize("arch", [FLASH, ALIGNED, SMALL, DEMO, UNSCALED])
def test_config_round_trip_keeps_everything(arch: Architecture, weight_format: Any) -> None:
    arch = arch.with_format(weight_format)
    written = json.loads(json.dumps(arch.to_config()))
    assert Architecture.from_config(written) == arch
    assert arch.weight_format == weight_format


def test_load_reads_directory_or_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEMO.to_config()))
    assert Architecture.load(tmp_path) == Architecture.load(tmp_path / "config.json") == DEMO


def test_flash_layers_have_their_kinds() -> None:
    kinds = [FLASH.kind(layer) for layer in range(44)]
    assert kinds[:4] == ["window", "window", "c4", "pooled"]
    assert kinds[42:] == ["c4", "window"]
    assert (kinds.count("c4"), kinds.count("pooled")) == (21, 20)
    assert [FLASH.is_hash_routed(layer) for layer in range(4)] == [True, True, True, False]


def test_yarn_bends_pairs_15_to_25_of_flash() -> None:
    assert FLASH.rope_scaling is not None
    assert yarn_range(FLASH, FLASH.rope_scaling) == (15, 25)
    plain = [160000 ** (-2 * i / 64) for i in range(32)]
    bent = FLASH.rope_frequencies(2)
    for i in range(32):
        ramp = min(max((i - 15) / 10, 0), 1)
        assert math.isclose(bent[i], plain[i] * (1 - ramp) + plain[i] / 16 * ramp, rel_tol=1e-14)
    assert FLASH.rope_frequencies(0) == tuple(10000 ** (-2 * i / 64) for i in range(32))


REQUIRED = sorted(
    set(FLASH.to_config())
    - {"architectures", "model_type", "layer_types", "compress_rates", "num_key_value_heads"}
    - {"tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id"}
    - {"clamp_shared_experts", "quantization_config", "expert_dtype", "torch_dtype"}
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    config = FLASH.to_config()
    del config[key]
    with pytest.raises(ValueError, match=f"{key!r}: expected .*, found no such key"):
        Architecture.from_config(config)


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast"])
def test_missing_yarn_key_is_named(key: str) -> None:
    config = FLASH.to_config()
    del config["rope_scaling"][key]
    with pytest.raises(ValueError, match=f"rope_scaling.{key}.*no such key"):
        Architecture.from_config(config)


WRONG = {
    "ratio list too short": ({"compress_ratios": [0, 4]}, "compress_ratios.*44 entries.*2 entries"),
    "ratio unknown": ({"compress_ratios": [0] * 42 + [6, 0]}, r"compress_ratios\[42\].*found 6"),
    "ratio not a number": ({"compress_ratios": ["4"] * 44}, "compress_ratios.*list of integers"),
    "prediction block compressed": ({"compress_ratios": [0] * 43 + [4]}, r"ratios\[43\].*0"),
    "groups do not divide heads": ({"o_groups": 7}, "o_groups.*divisor of num_attention_heads 64"),
    "odd rotary dims": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim.*even.*63"),
    "rotary dims fill the head": ({"qk_rope_head_dim": 512}, "below head_dim 512.*found 512"),
    "indexer head no power of two": ({"index_head_dim": 96}, "index_head_dim.*power of two.*96"),
    "more experts than there are": ({"num_experts_per_tok": 257}, "at most n_routed_experts 256"),
    "hash layers beyond the model": ({"num_hash_layers": 44}, "num_hash_layers.*at most 43"),
    "a string for a size": ({"hidden_size": "4096"}, "hidden_size.*an integer, found '4096'"),
    "a flag for a size": ({"hidden_size": True}, "hidden_size.*an integer, found True"),
    "zero size": ({"sliding_window": 0}, "sliding_window.*at least 1, found 0"),
    "experts without end": ({"n_routed_experts": 10**6}, "experts.*at most 4096, found 1000000"),
    "layers without end": ({"num_hidden_layers": 10**9}, "layers.*at most 1024, found 1000000000"),
    "a size without end": ({"hidden_size": 1 << 30}, "hidden_size.*at most 16777216, found"),
    "tensors without end": (
        {"num_hidden_layers": 1000, "n_routed_experts": 4000},
        "n_routed_experts of all layers.*at most 1048576, found 4004000",
    ),
    "other router": ({"scoring_func": "softmax"}, "scoring_func.*sqrtsoftplus.*softmax"),
    "other rope": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type.*'yarn'.*'linear'"),
    "other block size": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"weight_block_size.*\(128, 128\).*\(64, 64\)",
    ),
    "an empty quantisation": (
        {"quantization_config": {}},
        "quantization_config.quant_method.*'fp8', found no such key",
    ),
    "no block size": (
        {"quantization_config": {"quant_method": "fp8"}},
        r"weight_block_size.*\(128, 128\), found no such key",
    ),
    "base that turns nothing": ({"compress_rope_theta": 1}, "compress_rope_theta.*than 1, found 1"),
    "window base that turns nothing": ({"rope_theta": 1.0}, "'rope_theta'.*more than 1, found 1"),
    "no float holds it": ({"rope_theta": 10**400}, "rope_theta.*a finite number, found 10"),
    "other layer types": (
        {"layer_types": ["sliding_attention"] * 43},
        r"layer_types\[2\].*'compressed_sparse_attention' \(compress_ratios\[2\] is 4\), "
        "found 'sliding_attention'",
    ),
    "layer types too few": ({"layer_types": []}, "layer_types.*43 entries.*found '0 entries'"),
    "layer types no list": ({"layer_types": "sliding"}, "layer_types.*a list, found 'sliding'"),
    "other rates": (
        {"compress_rates": {"heavily_compressed_attention": 64}},
        r"compress_rates.heavily_compressed_attention.*128 \(compress_ratios\[3\].*found 64",
    ),
    "rates no object": ({"compress_rates": [4, 128]}, "compress_rates.*an object"),
    "FP4 rows not in groups": ({"moe_intermediate_size": 2000}, "multiple of 32 for FP4.*2000"),
    "another model": ({"model_type": "deepseek_v3"}, "model_type.*deepseek_v4.*deepseek_v3"),
    "a drafter instead of MTP": ({"dspark_block_size": 16}, "dspark_block_size.*no such key"),
    "not finite": ({"rope_theta": float("inf")}, "rope_theta.*finite number, found inf"),
    "tied head": ({"tie_word_embeddings": True}, "tie_word_embeddings.*False, found True"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_value_is_named_with_what_was_expected(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Architecture.from_config(FLASH.to_config() | change)


WRONG_YARN = {
    "factor of nothing": ({"factor": 0}, "factor.*at least 1, found 0"),
    "factor below 0": ({"factor": -16}, "factor.*at least 1, found -16"),
    "no positions": ({"original_max_position_embeddings": 0}, "embeddings.*at least 1, found 0"),
    "positions below 0": (
        {"original_max_position_embeddings": -1},
        "embeddings.*at least 1, found -1",
    ),
    "no fast turns": ({"beta_fast": 0}, "beta_fast.*more than beta_slow 1, found 0"),
    "no slow turns": ({"beta_slow": 0}, "beta_slow.*more than 0, found 0"),
    "ramp the other way": ({"beta_fast": 1, "beta_slow": 32}, "beta_fast.*beta_slow 32, found 1"),
    "a magnitude": ({"attention_factor": 1.28}, "attention_factor.*1.0 or no such key.*found 1.28"),
    "a magnitude by its name elsewhere": ({"mscale": 1.0}, "mscale.*0 or no such key.*found 1.0"),
    "an exact ramp": ({"truncate": False}, "truncate.*True or no such key.*found False"),
}


@pytest.mark.parametrize("case", WRONG_YARN)
def test_wrong_yarn_is_named_with_what_was_expected(case: str) -> None:
    change, message = WRONG_YARN[case]
    config = FLASH.to_config()
    config["rope_scaling"] |= change
    with pytest.raises(ValueError, match=rf"^config key 'rope_scaling\.\w*{message}"):
        Architecture.from_config(config)


def test_yarn_keys_that_do_nothing_are_accepted() -> None:
    config = FLASH.to_config()
    config["rope_scaling"] |= {"attention_factor": 1.0, "mscale": None, "rope_theta": 160000.0}
    assert Architecture.from_config(config) == FLASH


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_config_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: expected an object, found a "):
        Architecture.load(tmp_path)
    with pytest.raises(ValueError, match="config: expected an object, found a "):
        Architecture.from_config(json.loads(text))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b""])
def test_config_that_is_no_json_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        Architecture.load(tmp_path)


def test_null_rope_scaling_means_no_yarn() -> None:
    config = FLASH.to_config() | {"rope_scaling": None}
    assert Architecture.from_config(config).rope_frequencies(2)[31] == 160000 ** (-62 / 64)


def test_architecture_names_and_policy_do_not_import_torch() -> None:
    code = (
        "import sys, shared.models.deepseek_v4.names, shared.quant.policy;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_config_nested_without_end_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config.json: expected JSON, found none: .*recursion"):
        Architecture.load(tmp_path)
