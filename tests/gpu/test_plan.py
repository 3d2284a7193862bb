"""The planner against a device: states at rest, and the peak of training steps, with each setting
that saves memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.engine.actor import Actor
from services.trainer.megatron import parallel
from shared.models.deepseek_v4.checkpoint import write_release
from shared.planner import plan
from tests.gpu.actor_run import Load, measure_apart, speed_job
from tests.gpu.releases import NARROW, SINGLE, write_random_release
from tests.tiny_deepseek_v4 import DEMO, random_weights

GIB = 2**30
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute attention and experts": {"actor": {"recompute": {"mode": "selective"}}},
    "recompute blocks": {"actor": {"recompute": {"mode": "full"}}},
    "offload": {"actor": {"optimizer": {"offload": {"fraction": 1.0}}}},
    "offload, nothing at once": {
        "actor": {"optimizer": {"offload": {"fraction": 1.0, "overlap": False}}}
    },
}


@pytest.mark.timeout(300)
def test_the_plan_holds_on_a_device(tmp_path: Path, figures: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    write_random_release(folder, SINGLE)
    found = measure_apart(folder, {})
    memory = plan(SINGLE, speed_job(folder, {}, Load())).stages[0].memory
    planned = {"states_gib": memory.states / GIB, "peak_gib": memory.total / GIB}
    measured = {"states_gib": found["gib_after_start"], "peak_gib": found["gib_peak"]}
    figures["plan"] = {"planned": planned, "measured": measured}
    assert planned["states_gib"] == pytest.approx(measured["states_gib"], rel=0.01)
    activations = measured["peak_gib"] - measured["states_gib"]
    assert planned["peak_gib"] - planned["states_gib"] == pytest.approx(activations, rel=0.25)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "narrow"
    write_random_release(folder, NARROW)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_plan_of_a_memory_setting_holds(
    name: str, narrow: Path, figures: dict[str, Any]
) -> None:
    document = SETTINGS[name]
    found = measure_apart(narrow, document)
    memory = plan(NARROW, speed_job(narrow, document, Load())).stages[0].memory
    states, activations = (memory.states / GIB, (memory.total - memory.states) / GIB)
    measured = found["gib_peak"] - found["gib_after_start"]
    planned = {"states_gib": states, "activations_gib": activations}
    figures.setdefault("memory", {})[name] = {"planned": planned, "measured": found}
    assert states == pytest.approx(found["gib_after_start"], rel=0.01)
    assert activations == pytest.approx(measured, rel=0.25)


@pytest.mark.timeout(300)
def test_logits_in_chunks_take_less_than_whole_ones(narrow: Path, figures: dict[str, Any]) -> None:
    """Of a micro-batch: whole ones are 16,384 x 4,096 FP32 numbers, and their gradient."""
    kept = figures.setdefault("memory", {})
    whole = measure_apart(narrow, {}, "--token-chunk", str(2**20))
    kept["whole logits"] = {"measured": whole}
    chunked = kept["plain"]["measured"] if "plain" in kept else measure_apart(narrow, {})
    assert chunked["gib_peak"] <= whole["gib_peak"]


@pytest.fixture
def _world_of_one() -> Iterator[None]:
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@pytest.mark.usefixtures("_world_of_one")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_states_are_on_the_host(tmp_path: Path, dtype: str) -> None:
    """Masters, which travel, are pinned; the rest stays on the device, wholly FP32."""
    folder = tmp_path / "release"
    write_release(folder, DEMO.with_format("fp32"), random_weights(DEMO, seed=3, spread=0.5))
    optimizer = {"offload": {"fraction": 0.5}}
    document = {
        "actor": {"dtype": dtype, "quantisation": "none", "optimizer": optimizer},
    }
    for part in Actor(speed_job(folder, document, Load(length=256))).optimizer.chained_optimizers:
        inner = part.optimizer
        moved = inner.gpu_params_map_cpu_copy
        assert moved
        assert len(moved) < len(inner.state)
        for parameter, state in inner.state.items():
            kind = "cpu" if parameter in moved else "cuda"
            tensors = [state[name] for name in ("master_param", "exp_avg", "exp_avg_sq")]
            assert {(one.device.type, one.dtype) for one in tensors} == {(kind, torch.float32)}
            assert tensors[0].is_pinned() == (kind == "cpu")
