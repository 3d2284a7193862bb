"""The planner against a device: states at rest, what offloading takes from them, and the peak of
training steps."""

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
from tests.gpu.releases import SINGLE, write_random_release
from tests.tiny_deepseek_v4 import DEMO, random_weights

GIB = 2**30


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


@pytest.mark.timeout(600)
def test_offloading_frees_the_planned_bytes(tmp_path: Path, figures: dict[str, Any]) -> None:
    """At rest, and what training with it allocates at most."""
    folder = tmp_path / "model"
    write_random_release(folder, SINGLE)
    found, states = {}, {}
    for fraction in (0.0, 1.0):
        document = {"actor": {"optimizer": {"offload": {"fraction": fraction}}}}
        found[fraction] = measure_apart(folder, document)
        job = speed_job(folder, document, Load())
        states[fraction] = plan(SINGLE, job).stages[0].memory.states / GIB
    planned = states[0.0] - states[1.0]
    freed = found[0.0]["gib_after_start"] - found[1.0]["gib_after_start"]
    freed_at_peak = found[0.0]["gib_peak"] - found[1.0]["gib_peak"]
    figures["offload"] = {"planned_gib": planned, "freed_gib": freed, "measured": found}
    assert freed == pytest.approx(planned, rel=0.01)
    assert freed_at_peak > 0.9 * planned


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
