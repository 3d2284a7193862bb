"""The planner against what a step holds: states within 1 %, activations within 25 %."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer.checkpoint import Writer, load
from services.trainer.convert.torch_dist import TorchDist
from services.trainer.fp8.emulated import EmulatedFp8
from services.trainer.fp8.products import EXACT
from services.trainer.megatron.measure import built, measure
from services.trainer.megatron.tracker import MemoryTracker
from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.plan import plan_setup
from shared.planner.setup import Machine, Setup
from tests.tiny_deepseek_v4 import ALIGNED, DEMO

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of load:UserWarning"),
]
WITH_MTP = replace(
    DEMO,
    num_nextn_predict_layers=1,
    compress_ratios=(*DEMO.compress_ratios[: DEMO.num_hidden_layers], 0),
)
LARGE_VOCABULARY = replace(ALIGNED, vocab_size=4096)


def setup(dtype: str, length: int, recompute: str) -> Setup:
    return Setup(
        dtype=dtype,
        max_tokens=512,
        sample_tokens=length,
        response_tokens=length * 3 // 4,
        recompute=recompute,
        scores_as_served=False,
    )


@pytest.mark.parametrize(
    ("arch", "length", "dtype", "recompute"),
    [
        (DEMO, 64, "bfloat16", "none"),
        (DEMO, 256, "bfloat16", "selective"),
        (DEMO, 256, "float32", "full"),
        (DEMO, 512, "float32", "none"),
        (ALIGNED, 256, "bfloat16", "none"),
        (LARGE_VOCABULARY, 128, "float32", "none"),
    ],
    ids=["demo, bf16", "selective", "full", "demo, long", "aligned, bf16", "large vocabulary"],
)
def test_the_plan_holds(
    megatron: None, arch: Architecture, length: int, dtype: str, recompute: str
) -> None:
    asked = setup(dtype, length, recompute)
    found, planned = measure(arch, asked), plan_setup(arch, asked, Machine()).stages[0].memory
    assert planned.weights == pytest.approx(found.weights, rel=0.01)
    assert planned.gradients == pytest.approx(found.gradients, rel=0.01)
    assert planned.optimizer == pytest.approx(found.optimizer, rel=0.01)
    activations = planned.activations + planned.working + planned.buffers
    assert activations == pytest.approx(found.activations, rel=0.25)


def test_fp8_products_hold_no_more_than_exact_ones(megatron: None) -> None:
    """Rounded copies are gone before anything larger is made."""
    asked = setup("bfloat16", 64, "none")
    exact, fp8 = (measure(DEMO, asked, products=kind) for kind in (EXACT, EmulatedFp8()))
    assert fp8.activations == pytest.approx(exact.activations, rel=0.01)


def test_the_plan_holds_where_an_mtp_block_is_trained(megatron: None) -> None:
    asked = replace(setup("bfloat16", 256, "full"), mtp_loss_weight=0.1)
    found, planned = (
        measure(WITH_MTP, asked),
        plan_setup(WITH_MTP, asked, Machine()).stages[0].memory,
    )
    frozen = measure(WITH_MTP, replace(asked, mtp_loss_weight=0.0))
    assert found.gradients > 1.15 * frozen.gradients
    assert planned.gradients == pytest.approx(found.gradients, rel=0.01)
    assert planned.optimizer == pytest.approx(found.optimizer, rel=0.01)
    activations = planned.activations + planned.working + planned.buffers
    assert activations == pytest.approx(found.activations, rel=0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_a_save_needs_what_was_planned(
    megatron: None, tmp_path: Path, dtype: str, offload: float
) -> None:
    """In the background a copy of weights and states; else, on a CPU, one of the weights, which lie
    in one buffer there (and of FP32 masters, which are those weights)."""
    asked = replace(setup(dtype, 64, "none"), offload=offload, background_saves=True)
    stage = plan_setup(DEMO, asked, Machine()).stages[0]
    needed = {}
    with MemoryTracker() as tracker:
        model, optimizer = built(DEMO, asked)
        before = tracker.live_bytes
        for copy in (True, False):
            tracker.restart_peak()
            writer = Writer()
            writer.start(
                tmp_path / f"{copy}",
                model=model,
                optimizer=optimizer,
                progress={"step": 1, "policy_version": 1},
                copy=copy,
            )
            needed[copy] = tracker.peak_bytes - before
            writer.finish(wait=True)
            del writer
            gc.collect()
            assert tracker.live_bytes < before + 100_000
        tracker.restart_peak()
        load(tmp_path / "True", model=model, optimizer=optimizer)
        largest = max(parameter.numel() for parameter in model.parameters())
        assert tracker.peak_bytes < before + 2 * 4 * largest  # read to where it belongs
    assert needed[True] == pytest.approx(stage.host.checkpoint, rel=0.02)
    exact = stage.parameters.dense_exact + (stage.parameters.trained if dtype == "float32" else 0)
    assert needed[False] <= 1.02 * (stage.memory.weights + 4 * exact)
    saved = [TorchDist(tmp_path / f"{copy}") for copy in (True, False)]
    assert all(torch.equal(saved[0].read(key), saved[1].read(key)) for key in saved[0].tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_host_holds_what_was_planned(megatron: None, dtype: str) -> None:
    asked = replace(setup(dtype, 64, "none"), offload=1.0)
    found = measure(DEMO, asked)
    stage = plan_setup(DEMO, asked, Machine()).stages[0]
    assert stage.memory.optimizer == 0
    planned = stage.host.experts + stage.host.dense
    assert planned == pytest.approx(found.optimizer, rel=0.01)


def test_the_tracker_counts_storages_once_and_forgets_them() -> None:
    with MemoryTracker() as tracker:
        kept = torch.zeros(1000)
        view = kept.view(10, 100)
        assert tracker.live_bytes == 4000
        assert float((view * 2).sum()) == 0  # freed at once
        assert tracker.live_bytes == 4000
        assert 8000 <= tracker.peak_bytes <= 8100
        del kept, view
    assert tracker.live_bytes == 0
