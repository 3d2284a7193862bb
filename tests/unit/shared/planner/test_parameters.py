"""Parameters per rank: nothing is lost or counted twice, and Flash's figures are the known ones."""

from dataclasses import replace
from math import prod

import pytest

from shared.models.deepseek_v4.names import weight_shapes
from shared.parallel import Layout
from shared.planner.parameters import Parameters, stage_parameters
from tests.tiny_deepseek_v4 import ALIGNED, FLASH

PUBLISHED = Layout(world=16, pipeline=4, expert=4, last_stage_layers=10)


def held(layout: Layout, arch=ALIGNED, *, freeze_router: bool = True) -> list[Parameters]:
    stages = range(layout.pipeline)
    return [
        stage_parameters(arch, layout, stage=stage, freeze_router=freeze_router) for stage in stages
    ]


def test_one_rank_holds_every_tensor_once() -> None:
    (one,) = held(Layout())
    shapes = weight_shapes(ALIGNED)
    tables = sum(prod(shape) for name, shape in shapes.items() if name.endswith("tid2eid"))
    assert one.table_entries == tables
    assert one.total == sum(map(prod, shapes.values())) - tables


def test_stages_and_expert_ranks_hold_the_model_between_them() -> None:
    (one,) = held(Layout())
    cut = held(Layout(world=4, pipeline=2, expert=2))
    assert sum(part.experts for part in cut) * 2 == one.experts
    assert sum(part.dense for part in cut) == one.dense
    mtp_experts = 3 * 8 * 256 * 256  # frozen, and spread as well
    assert sum(part.frozen for part in cut) == one.frozen - mtp_experts // 2


def test_tensor_ranks_share_heads_groups_shared_experts_and_vocabulary() -> None:
    (one,), (half,) = held(Layout()), held(Layout(world=2, tensor=2))
    a = ALIGNED
    heads = a.num_attention_heads * a.head_dim
    shared_out = 2 * a.vocab_size * a.hidden_size + a.num_hidden_layers * (
        heads * a.q_lora_rank
        + (heads // a.o_groups) * a.o_groups * a.o_lora_rank
        + a.o_groups * a.o_lora_rank * a.hidden_size
        + 3 * a.moe_intermediate_size * a.hidden_size
    )
    assert one.dense - half.dense == shared_out // 2
    assert half.experts == one.experts


def test_a_trained_router_is_trained() -> None:
    (frozen,), (trained,) = held(Layout()), held(Layout(), freeze_router=False)
    gates = 4 * 8 * 256
    assert trained.dense - frozen.dense == frozen.frozen - trained.frozen == gates


def test_flash_on_the_published_layout() -> None:
    stages = held(PUBLISHED, FLASH)
    assert [round(stage.total / 1e9, 2) for stage in stages] == [19.83, 19.31, 19.33, 19.87]
    # 11 layers x 64 experts x 3 x 4096 x 2048, and 12 bytes of Adam for each: 213 GB.
    assert stages[0].experts == 11 * 64 * 3 * 4096 * 2048
    assert stages[0].experts * 12 == pytest.approx(213e9, rel=0.01)


def test_bytes_follow_the_formats() -> None:
    (one,) = held(Layout(), replace(ALIGNED, num_hash_layers=0))
    exact = one.dense_exact + one.frozen_exact
    assert one.weight_bytes(4) == 4 * one.total
    assert one.weight_bytes(2) == 2 * one.total + 2 * exact


def test_a_trained_mtp_block_is_trained_and_reads_a_copy_of_the_embedding() -> None:
    layout = Layout(world=2, pipeline=2)
    frozen, trained = (
        stage_parameters(ALIGNED, layout, stage=1, freeze_router=True, trains_mtp=trains)
        for trains in (False, True)
    )
    embedding = ALIGNED.vocab_size * ALIGNED.hidden_size
    assert trained.experts - frozen.experts == 3 * 8 * 256 * 256
    assert trained.total - frozen.total == embedding
    assert trained.trained > frozen.trained
