"""The actor on two GPUs over NCCL: every layout trains as one rank does, its speed and memory.

Weights and losses are compared in FP32 on a small model, whose bounds are those of the layouts on a
CPU; speed, memory and traffic are those of real head dimensions in BF16.
"""

import json
import os
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.models.deepseek_v4.checkpoint import write_release
from shared.planner import plan
from tests.gpu.actor_run import Load
from tests.gpu.pair import Pair
from tests.gpu.releases import SINGLE, releases
from tests.gpu.two_actors import LAYOUTS, TURN_FILE, job_of, num_ranks
from tests.gpu.two_layouts import NAMES
from tests.integration.test_layouts import (
    ARCHITECTURE,
    LOSS,
    SCORES,
    assert_same_state,
    exported,
    found,
    relative,
    tensors,
)
from tests.tiny_deepseek_v4 import random_weights

Figures = dict[str, Any]
RELEASES = "GPU_RELEASES"  # a folder that may have release A already
TWO = [name for name in NAMES if name != "one"]
GIB = 2**30
LAYOUT_S = 90.0  # imports, start and three steps

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, here are {torch.cuda.device_count()}"
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    release = folder / "release"
    weights = random_weights(ARCHITECTURE, seed=3, spread=0.5)
    write_release(release, ARCHITECTURE.with_format("fp8"), weights)
    arguments = [str(release), str(folder)]
    with Pair("tests.gpu.two_layouts", arguments, log=folder / "log") as pair:
        pair.finish(200)
    return folder


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TWO)
def test_a_layout_trains_as_one_rank_does(name: str, small: Path, figures: Figures) -> None:
    one, other = found(small, "one"), found(small, name)
    figures.setdefault("layouts", {})[name] = {
        "loss, gradient norm": max(
            abs(here[key] - there[key]) / max(abs(there[key]), 0.1)
            for here, there in zip(other["metrics"], one["metrics"], strict=True)
            for key in ("loss", "grad_norm")
        ),
        "weights": _largest(small, name, "step3", of_gradients=False),
        "gradients": _largest(small, name, "step1", of_gradients=True),
        "log-probabilities": max(
            float(np.abs(np.subtract(here, there)).max())
            for here, there in zip(other["scores"], one["scores"], strict=True)
        ),
    }
    for here, there in zip(other["metrics"], one["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "delta_logprob_mean", "tis_weight_mean"):
            assert here[key] == pytest.approx(there[key], rel=10 * LOSS, abs=LOSS), key
    for row, expected in zip(other["scores"], one["scores"], strict=True):
        assert row == pytest.approx(expected, abs=SCORES)
    for step in ("step1", "step3"):
        assert_same_state(tensors(small / "one" / step), tensors(small / name / step))
    assert exported(small, name) == exported(small, "one")


def _largest(small: Path, name: str, step: str, *, of_gradients: bool) -> float:
    """Relative difference of a whole tensor; Adam's first mean is the first gradient."""
    one, other = tensors(small / "one" / step), tensors(small / name / step)
    kept = [key for key in one if key.startswith("optimizer.state.exp_avg") == of_gradients]
    return max(relative(one[key], other[key]) for key in kept)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("actors")
    release = releases(Path(os.environ.get(RELEASES, folder)), ["A"])["A"]
    (folder / TURN_FILE).write_text("")
    with ExitStack() as stack:  # all import at once, then have the GPUs one after the other
        pairs = {}
        for name in LAYOUTS:
            arguments, log = [str(release), str(folder), name], folder / f"{name}.log"
            pair = Pair("tests.gpu.two_actors", arguments, log=log, ranks=num_ranks(name))
            pairs[name] = stack.enter_context(pair)
        for name, pair in pairs.items():
            (folder / TURN_FILE).write_text(name)
            with suppress(AssertionError):  # its own test shows the log
                pair.finish(LAYOUT_S)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_speed_memory_and_traffic(name: str, real: Path, figures: Figures) -> None:
    load = Load()
    missing = [r for r in range(num_ranks(name)) if not (real / f"{name}.{r}.json").exists()]
    assert not missing, (real / f"{name}.log").read_text(errors="replace")[-4000:]
    ranks = [json.loads((real / f"{name}.{r}.json").read_text()) for r in range(num_ranks(name))]
    planned = plan(SINGLE, job_of(Path("A"), name, load))
    kept = figures.setdefault("actor", {})
    if bare := ranks[0].get("bare"):
        kept["bare collectives, GB/s"] = bare
    told = kept[name] = summary(ranks, load) | {"ranks": [], "weights": moved(real, name)}
    for rank, one in enumerate(ranks):
        stage = planned.setup.layout.stage_of(rank)
        memory = planned.stages[stage].memory
        told["ranks"].append(
            {
                "parameters": one["parameters"],
                "states_gib": [one["held_bytes"] / GIB, memory.states / GIB],
                "peak_gib": [one["peak_bytes"] / GIB, memory.total / GIB],
                "traffic": traffic(one, [each for each in planned.traffic if each.stage == stage]),
            }
        )
    for one in told["ranks"]:
        measured, expected = one["states_gib"]
        assert expected == pytest.approx(measured, rel=0.01)
        for operation, each in one["traffic"].items():
            assert each["calls"][0] == each["calls"][1], operation
            bound = 0.2 if operation == "all-to-all" else 0.02
            assert each["bytes"][1] == pytest.approx(each["bytes"][0], rel=bound), operation
    assert told["tokens_per_s"] > 1000


def summary(ranks: list[Figures], load: Load) -> Figures:
    """Seconds are of the fastest step behind the first; losses of all."""
    steps = ranks[0]["steps"]
    best = min(one["seconds"]["step"] for one in steps[1:])
    return {
        "start_s": round(ranks[0]["start_s"], 2),
        "seconds": [one["seconds"] for one in steps],
        "tokens_per_s": round(load.tokens / best),
        "losses": [one["loss"] for one in steps],
        "gradient norms": [one["grad_norm"] for one in steps],
    }


def traffic(measured: Figures, planned: list[Any]) -> Figures:
    """[measured, planned] calls and bytes of one rank and step, by operation."""
    calls: dict[str, int] = defaultdict(int)
    sent: dict[str, float] = defaultdict(float)
    for one in planned:
        calls[one.operation] += one.calls
        sent[one.operation] += one.num_bytes
    return {
        operation: {
            "calls": [measured["calls"].get(operation, 0), calls[operation]],
            "bytes": [measured["sent_bytes"].get(operation, 0.0), sent[operation]],
        }
        for operation in sorted({*measured["calls"], *calls})
    }


def moved(real: Path, name: str) -> Figures:
    """How far a layout's weights are from those of one rank, as a share of how far three steps
    moved those; parts of every tensor, BF16."""
    if not (real / "one.0.npz").exists() or name == "one":
        return {}
    one = np.load(real / "one.0.npz")
    parts = {}
    for rank in range(num_ranks(name)):
        parts |= dict(np.load(real / f"{name}.{rank}.npz"))
    names = [key for key in one if not key.startswith("before/")]
    apart = sum(float(np.square(parts[key] - one[key]).sum()) for key in names)
    steps = sum(float(np.square(one[key] - one[f"before/{key}"]).sum()) for key in names)
    return {"tensors": len(names), "of the steps": (apart / steps) ** 0.5 if steps else None}
