"""The planner against what a step holds: states within 1 %, activations within 25 %."""

from dataclasses import replace

import pytest
import torch

from services.trainer.fp8.emulated import EmulatedFp8
from services.trainer.fp8.products import EXACT
from services.trainer.megatron.measure import measure
from services.trainer.megatron.tracker import MemoryTracker
from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.plan import plan_setup
from shared.planner.setup import Machine, Setup
from tests.tiny_deepseek_v4 import ALIGNED, DEMO

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning")
LARGE_VOCABULARY = replace(ALIGNED, vocab_size=4096)


def setup(dtype: str, length: int, recompute: str) -> Setup:
    return Setup(
        dtype=dtype,
        max_tokens=512,
        sample_tokens=length,
        response_tokens=length * 3 // 4,
        recompute=recompute,
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
