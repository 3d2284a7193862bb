import pytest
import torch

from services.trainer.convert.layouts import (
    actor_layout,
    release_layout,
    shards,
    transformers_layout,
    without_mtp,
)
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import tensor_specs
from shared.models.deepseek_v4.runtimes import to_runtime
from shared.quant.policy import POLICIES
from tests.tiny_deepseek_v4 import ALIGNED, FLASH, SMALL, random_weights

FP32 = POLICIES["fp32"]


def test_pieces_of_transformers_tensors_lie_one_after_the_other() -> None:
    arch = without_mtp(ALIGNED)
    weights = random_weights(arch, seed=1)
    theirs = to_runtime(weights, arch, "transformers")
    layout = {output.name: output for output in transformers_layout(arch, FP32)}
    assert layout.keys() == theirs.keys()
    for name, output in layout.items():
        assert output.shape == tuple(theirs[name].shape)
        flat = torch.cat([weights[piece.weight].flatten() for piece in output.pieces])
        assert torch.equal(flat, theirs[name].flatten()), name


def test_mtp_blocks_are_left_out_of_transformers_only() -> None:
    def blocks(layout: list) -> set[str]:
        return {
            piece.weight for output in layout for piece in output.pieces if "mtp." in piece.weight
        }

    assert blocks(actor_layout(ALIGNED, FP32))
    assert not blocks(transformers_layout(ALIGNED, FP32))
    assert without_mtp(ALIGNED).num_nextn_predict_layers == 0


@pytest.mark.parametrize("arch", [SMALL, ALIGNED])
@pytest.mark.parametrize("layout", [release_layout, actor_layout])
def test_every_part_has_one_place(arch: Architecture, layout: object) -> None:
    outputs = layout(arch, FP32)  # type: ignore[operator]
    parts = [piece.part for output in outputs for piece in output.pieces]
    assert sorted(parts) == sorted(tensor_specs(arch, policy=FP32))
    for output in outputs:
        assert [piece.index for piece in output.pieces] == sorted(p.index for p in output.pieces)


def test_experts_of_the_actor_are_stacked_gate_before_up() -> None:
    layout = {output.name: output for output in actor_layout(ALIGNED, FP32)}
    w13 = layout["layers.1.ffn.experts.w13"]
    assert w13.shape == (8, 2, 256, 256)
    assert [piece.index for piece in w13.pieces[:3]] == [(0, 0), (0, 1), (1, 0)]
    assert [piece.weight.split("experts.")[1] for piece in w13.pieces[:3]] == [
        "0.w1.weight",
        "0.w3.weight",
        "1.w1.weight",
    ]


@pytest.mark.parametrize("weight_format", ["fp8", "fp4", "bf16"])
def test_shards_are_bounded_and_keep_codes_with_their_scales(weight_format: str) -> None:
    outputs = release_layout(FLASH, POLICIES[weight_format])
    groups = list(shards(outputs, 4 << 30))
    assert [output for group in groups for output in group] == outputs
    assert len(groups) > 30
    for group in groups:
        assert sum(output.num_bytes for output in group) <= 4 << 30
        names = {output.name for output in group}
        assert all(output.pieces[0].weight in names for output in group)


def test_a_tensor_beyond_the_limit_is_a_shard_of_its_own() -> None:
    groups = list(shards(release_layout(SMALL, FP32), 1))
    assert all(len(group) == 1 for group in groups)
