"""Layouts that a model cannot have are refused with field, value and bound."""

import re
from dataclasses import replace
from typing import Any

import pytest

from shared.job import Job
from shared.models.deepseek_v4.layout import check_layout, row_alignment
from shared.parallel import Layout
from shared.planner import plan
from tests.tiny_deepseek_v4 import ALIGNED, FLASH

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 4, "tensor": 4}, "tensor 4 does not divide o_groups 2"),
    ({"ranks": 3, "tensor": 3}, "tensor 3 does not divide num_attention_heads 4"),
    ({"ranks": 16, "expert": 16}, "expert 16 does not divide n_routed_experts 8"),
    ({"ranks": 3, "pipeline": 3}, "4 layers do not make 3 pipeline stages"),
    (
        {
            "ranks": 3,
            "context": 3,
            "context_length": 1200,
            "actor": {"max_tokens_per_gpu": 400},
        },
        r"1200 tokens is padded to 1536 .* above actor.max_tokens_per_gpu x context = 1200",
    ),
    (
        {"ranks": 4, "expert_tensor": 4, "actor": {"quantisation": "weights"}},
        "expert_tensor 4 cuts the expert width 256 inside blocks of 128",
    ),
    (
        {"ranks": 4, "expert_tensor": 4, "actor": {"precision": "fp8"}},
        "expert width 256 inside .* that share a scale, so actor.precision must be dtype",
    ),
    (
        {"ranks": 2, "context": 2, "actor": {"mtp_loss_weight": 0.1}},
        "mtp_loss_weight 0.1 needs actor.parallel.context 1, not 2",
    ),
]


def job(*, ranks: int, context_length: int = 64, actor: Any = None, **parallel: int) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": "unused"},
            "data": {"path": "unused.jsonl"},
            "sampling": {"context_length": context_length, "max_response_tokens": 24},
            "cluster": {"gpus_per_node": ranks},
            "actor": {"max_tokens_per_gpu": 512, "parallel": parallel, **(actor or {})},
        }
    )


def test_the_published_layout_fits_flash() -> None:
    check_layout(job(ranks=16, pipeline=4, expert=4, last_stage_layers=10), FLASH)


@pytest.mark.parametrize(("changes", "complaint"), REFUSED)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_layout(job(**changes), ALIGNED.with_format("fp8"))


@pytest.mark.parametrize("changes", [changes for changes, _ in REFUSED])
def test_the_plan_refuses_it_in_the_same_words(changes: dict[str, Any]) -> None:
    arch = ALIGNED.with_format("fp8")
    problem, *_ = plan(arch, job(**changes)).problems
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        check_layout(job(**changes), arch)


def test_unquantised_weights_may_be_cut_anywhere_but_fp8_products_have_blocks() -> None:
    asked = job(ranks=4, expert_tensor=4, actor={"quantisation": "weights"})
    check_layout(asked, ALIGNED)
    with pytest.raises(ValueError, match=r"actor\.precision must be dtype"):
        check_layout(job(ranks=4, expert_tensor=4, actor={"precision": "fp8"}), ALIGNED)
    check_layout(job(ranks=2, tensor=2, actor={"precision": "fp8"}), ALIGNED)


def test_context_ranks_hold_whole_blocks_of_every_row() -> None:
    assert row_alignment(Layout(), ALIGNED) == 8
    assert row_alignment(Layout(world=2, context=2), ALIGNED) == 2 * 128
    small = replace(ALIGNED, compress_ratios=(0, 4, 8, 4, 0))
    assert row_alignment(Layout(world=4, context=2, tensor=2), small) == 2 * 8
