"""The plan of the published run, and how each setting moves it."""

from dataclasses import replace

import pytest

from shared.job import Job
from shared.parallel import Layout
from shared.planner import Machine, plan
from shared.planner.plan import Plan, plan_setup
from shared.planner.setup import GB, Setup
from tests.tiny_deepseek_v4 import ALIGNED, FLASH

PUBLISHED = Setup(
    layout=Layout(world=16, pipeline=4, expert=4, last_stage_layers=10),
    recompute="full",
    offload=1.0,
)
MI355X = Machine(gpu_bytes=288 * GB, host_bytes=3000 * GB, gpus_per_node=8)


def published(**changes) -> Plan:
    return plan_setup(FLASH, replace(PUBLISHED, **changes), MI355X)


def test_the_published_layout_fits_with_recompute_and_offload() -> None:
    found = published()
    assert found.fits
    assert found.headroom_bytes == pytest.approx(114e9, rel=0.01)
    assert found.fullest.number == 0
    assert found.stages[0].host.experts == pytest.approx(213e9, rel=0.01)
    assert found.host_bytes == (pytest.approx(2325e9, rel=0.01), pytest.approx(2220e9, rel=0.01))


@pytest.mark.parametrize(
    ("changes", "short_by"), [({"recompute": "none"}, 28e9), ({"offload": 0.0}, 105e9)]
)
def test_it_does_not_without_either(changes: dict, short_by: float) -> None:
    found = published(**changes)
    assert not found.fits
    assert found.headroom_bytes == pytest.approx(-short_by, rel=0.02)
    assert "stage 0 needs" in found.problems[0]


def test_hosts_that_are_too_small_are_named() -> None:
    found = plan_setup(FLASH, PUBLISHED, replace(MI355X, host_bytes=2300 * GB))
    assert found.problems == (
        "the host of node 0 needs 2,325.0 GB for what is offloaded, kept and saved there, 25.0 GB "
        "more than it has",
    )


def test_hosts_hold_copies_of_what_is_saved_in_the_background_and_the_reference() -> None:
    bare, saving, keeping = (
        published(**more).stages[0]
        for more in ({}, {"background_saves": True}, {"keeps_reference": True})
    )
    states = bare.host.experts + bare.host.dense
    assert saving.host.total - bare.host.total == saving.host.checkpoint
    assert saving.host.checkpoint == pytest.approx(states + bare.memory.weights, rel=1e-3)
    assert keeping.host.total - bare.host.total == 2 * bare.memory.weights
    assert not published(background_saves=True).fits


def test_a_copy_of_the_weights_lies_there_while_a_probe_is_scored_as_served() -> None:
    """Between steps: what a step keeps for its backward pass is free then."""
    bare, scored, rounds = (
        published(**more).stages[0].memory
        for more in ({"scores_as_served": False}, {}, {"rounds": True})
    )
    passing = bare.activations + bare.working
    assert scored.buffers == scored.weights - passing
    assert scored.total == bare.states + scored.weights
    assert rounds.buffers == pytest.approx(bare.buffers + scored.weights, rel=0.01)
    busy = [
        published(recompute="none", scores_as_served=one).stages[0].memory for one in (True, False)
    ]
    assert busy[0] == busy[1]


def test_trained_mtp_blocks_count_on_the_last_stage_only() -> None:
    """An expert of Flash's MTP block: 3 matrices of 4,096 x 2,048; 64 of them on each GPU."""
    frozen, trained = published().stages, published(mtp_loss_weight=0.1).stages
    assert trained[:3] == frozen[:3]
    experts = 64 * 3 * 4096 * 2048
    more = trained[3].memory.gradients - frozen[3].memory.gradients
    assert more == pytest.approx(4 * experts, rel=0.15)  # and the block's dense part
    assert trained[3].host.experts - frozen[3].host.experts == 12 * experts
    copy = FLASH.vocab_size * FLASH.hidden_size * 2
    assert trained[3].memory.weights - frozen[3].memory.weights == copy


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"pipeline": 4}, "43 layers do not make 4 pipeline stages"),
        ({"tensor": 16}, "actor.parallel.tensor 16 does not divide o_groups 8"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_counted(
    sizes: dict[str, int], problem: str
) -> None:
    found = plan_setup(FLASH, Setup(layout=Layout(world=16, **sizes)), Machine())
    assert not found.fits
    assert found.problems[0].startswith(problem)


def test_a_sample_beyond_the_budget_is_a_problem_unless_context_ranks_share_it() -> None:
    setup = Setup(max_tokens=4096, sample_tokens=8192)
    assert "exceeds the budget of 4096" in plan_setup(FLASH, setup, Machine()).problems[0]
    shared = replace(setup, layout=Layout(world=2, context=2))
    assert plan_setup(FLASH, shared, Machine()).fits


def test_traffic_counts_what_a_rank_sends() -> None:
    setup = Setup(
        layout=Layout(world=4, pipeline=2, expert=2),
        dtype="float32",
        max_tokens=64,
        sample_tokens=64,
        samples_per_step=8,
    )
    found = plan_setup(ALIGNED, setup, Machine())
    sent = {(one.what, one.stage): one for one in found.traffic}
    tokens, width, micro_batches = 64, 256, 4
    streams = sent["streams", 0]
    assert (streams.num_bytes, streams.calls) == (micro_batches * tokens * 4 * width * 4, 4)
    experts = sent["tokens to experts", 0]
    # Two layers; rows, their weights and results, forward and backward; half leave the rank.
    assert experts.calls == 2 * 3 * 2 * micro_batches
    assert experts.num_bytes == 2 * 2 * micro_batches * tokens * 2 * (2 * width + 1) * 4 // 2
    assert ("gradients, experts", 0) not in sent  # no two ranks have the same ones
    dense = found.stages[0].parameters
    assert sent["gradients, dense", 0].num_bytes == (dense.dense + dense.dense_exact) // 2 * 4


def test_offload_moves_state_and_full_recompute_keeps_streams_only() -> None:
    kept, moved = published(offload=0.0), published(offload=0.5)
    state = kept.stages[1].memory.optimizer
    assert moved.stages[1].memory.optimizer == pytest.approx(state / 2, rel=1e-6)
    host = moved.stages[1].host
    # A little more: FP32 weights have their masters there, too.
    assert host.experts + host.dense == pytest.approx(state / 2, rel=1e-4)
    streams = 8192 * 4 * 4096 * 2
    assert published().stages[1].memory.activations == 11 * 3 * streams  # three are under way
    assert published(recomputed_blocks=5).stages[1].memory.activations > 11 * 3 * streams


def test_a_jobs_plan_reads_its_fields() -> None:
    job = Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 512, "max_response_tokens": 128},
            "actor": {"max_tokens_per_gpu": 256, "parallel": {"pipeline": 2}},
            "cluster": {"gpus_per_node": 4},
        }
    )
    found = plan(ALIGNED, job, machine=Machine(gpu_bytes=8 * GB))
    assert found.fits
    assert found.setup.layout == Layout(world=4, pipeline=2)
    assert found.setup.micro_batch.length == 256
    assert found.setup.micro_batches == 64
