"""The planner's memory beside what a step of small models holds, counted on a CPU.

python -m benchmarks.memory
"""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before anything imports torch

from dataclasses import replace
from pathlib import Path

import structlog
import torch

from services.trainer.megatron import parallel
from services.trainer.megatron.measure import measure
from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.plan import plan_setup
from shared.planner.setup import Machine, Setup

log = structlog.get_logger()
PROJECT = Path(__file__).parents[1]


def main() -> None:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    tiny = Architecture.load(PROJECT / "assets" / "tiny-dsv4").with_format("bf16")
    wide = replace(
        tiny, vocab_size=4096, hidden_size=256, head_dim=128, moe_intermediate_size=256, o_groups=4
    )
    for name, arch in (("tiny", tiny), ("wide", wide)):
        for setup in SETUPS:
            _compare(name, arch, setup)
        ratios = (*arch.compress_ratios[: arch.num_hidden_layers], 0)
        block = replace(arch, num_nextn_predict_layers=1, compress_ratios=ratios)
        _compare(name, block, WITH_MTP)
    parallel.leave()


PLAIN = tuple(
    Setup(dtype=dtype, max_tokens=1024, sample_tokens=length, response_tokens=length * 3 // 4)
    for dtype in ("bfloat16", "float32")
    for length in (64, 256, 1024)
)
SETUPS = (
    *PLAIN,
    replace(PLAIN[1], recompute="selective"),
    replace(PLAIN[1], recompute="full"),
)
WITH_MTP = replace(PLAIN[1], mtp_loss_weight=0.1)


def _compare(name: str, arch: Architecture, setup: Setup) -> None:
    found, planned = measure(arch, setup), plan_setup(arch, setup, Machine()).stages[0].memory
    states = found.weights + found.gradients + found.optimizer
    activations = planned.activations + planned.working + planned.buffers
    log.info(
        "memory",
        model=name,
        dtype=setup.dtype,
        recompute=setup.recompute,
        trains_mtp=setup.trains_mtp,
        rows=setup.rows,
        length=setup.sample_tokens,
        states_mb=round(states / 1e6, 2),
        states_ratio=round(planned.states / states, 4),
        activations_mb=round(found.activations / 1e6, 2),
        activations_ratio=round(activations / found.activations, 3),
    )


if __name__ == "__main__":
    main()
