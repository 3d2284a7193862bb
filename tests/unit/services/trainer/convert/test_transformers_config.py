from dataclasses import replace
from pathlib import Path

import pytest
from transformers import DeepseekV4Config

from services.trainer.convert.transformers_config import architecture_of
from shared.models.deepseek_v4.architecture import Architecture
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED


@pytest.mark.parametrize("arch", [ALIGNED, DEMO, SMALL, UNSCALED])
def test_what_transformers_saved_is_the_same_model(arch: Architecture, tmp_path: Path) -> None:
    config = DeepseekV4Config(**arch.to_config())
    config.save_pretrained(tmp_path)
    saved = config.to_dict()
    assert "compress_ratios" not in saved
    assert replace(architecture_of(saved), torch_dtype=arch.torch_dtype) == arch


def test_a_config_of_our_own_is_read_as_it_is() -> None:
    assert architecture_of(SMALL.to_config()) == SMALL


def test_a_missing_key_is_named() -> None:
    saved = DeepseekV4Config(**SMALL.to_config()).to_dict()
    del saved["compress_rates"]
    with pytest.raises(ValueError, match="'compress_rates': expected by transformers"):
        architecture_of(saved)


def test_hash_layers_come_first() -> None:
    saved = DeepseekV4Config(**SMALL.to_config()).to_dict()
    saved["mlp_layer_types"] = ["moe", "hash_moe", "moe", "moe", "moe"]
    with pytest.raises(ValueError, match="expected hash layers first"):
        architecture_of(saved)
