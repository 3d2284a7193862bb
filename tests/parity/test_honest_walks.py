"""Walks between sides that agree name nothing, whatever weights and tokens; with how much to spare.

`TANDEM_HONEST_PAIRS=30 pytest tests/parity/test_honest_walks.py` takes more of them; `pytest -s`
prints what came nearest to a departure.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.weights import build_version
from services.trainer.engine.actor import Actor
from shared.data import draw_order
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import load_release, write_release
from shared.parity.judge import MARGINS
from shared.parity.live_walk import LiveWalk, walk_sides
from shared.tokenizer import CheckpointTokenizer
from tests.parity.conftest import Findings
from tests.parity.live_sides import SamplerSide, TrainerSide, job_of
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, random_tokens, random_weights

pytestmark = [pytest.mark.usefixtures("megatron"), pytest.mark.timeout(600)]

PAIRS = int(os.environ.get("TANDEM_HONEST_PAIRS", "0"))
POLICY = Path("assets/tiny-dsv4")
PROBLEMS = [
    json.loads(line)["problem"]
    for line in Path("assets/arithmetic/train.jsonl").read_text().splitlines()
]
SHAPES = {
    "ALIGNED": ALIGNED,
    "DEMO": DEMO,
    "SMALL": SMALL,
    "deep": replace(SMALL, num_hidden_layers=10, compress_ratios=(0, 0, *(4, 128) * 4)),
    "wide": replace(
        ALIGNED,
        hidden_size=512,
        num_attention_heads=8,
        head_dim=128,
        num_nextn_predict_layers=0,
        compress_ratios=(0, 4, 128, 4),
    ),
    "other ratios": replace(
        SMALL,
        compress_ratios=(32, 4, 16, 4, 64),
        sliding_window=4,
        hc_mult=2,
        n_routed_experts=32,
        num_experts_per_tok=6,
        num_hash_layers=1,
    ),
}
KNOWN = {"float32": (121, 120), "bfloat16": (3, 4)}
"""Seeds of ALIGNED at which one flipped key, or the number of tokens that select, once was taken
for a mistake."""


def note(found: LiveWalk, findings: Findings, what: str, dtype: str) -> None:
    weights = [np.inf if p.weight is None else p.weight for p in found.result.points]
    nearest = int(np.argmax(weights))
    caught = {"of what may depart": weights[nearest]}
    findings.add(f"none: {what}", dtype, caught, found.result.points[nearest].label)
    assert found.result.first is None, found.result.verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_random_policies_and_tokens(
    shape: str, dtype: str, tmp_path: Path, findings: Findings
) -> None:
    seeds = range(100, 100 + PAIRS) if PAIRS else KNOWN[dtype][: 1 + (shape == "ALIGNED")]
    for seed in seeds:
        arch = SHAPES[shape].with_format("fp8" if seed % 2 else "fp4")
        weights = random_weights(arch, seed=seed)
        write_release(tmp_path / f"{seed}", arch, weights)
        trainer = TrainerSide(Actor(job_of(tmp_path / f"{seed}", dtype=dtype)))
        length = 256 if seed % 3 else 320
        tokens = random_tokens(arch, rows=1, length=length, seed=seed)[0].numpy()
        sampler = SamplerSide.of(arch, weights)
        found = await walk_sides(trainer, sampler, arch, tokens, margin=MARGINS[dtype])
        note(found, findings, f"{shape}, seed {seed}, {length} tokens", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_demo_policy_on_prompts_of_its_data(dtype: str, findings: Findings) -> None:
    """As the preflight of a job with that seed draws them."""
    arch, tokenizer = Architecture.load(POLICY), CheckpointTokenizer.load(POLICY)
    engine = EmbeddedEngine(EngineSpec(arch, 4, 320, True, 1))
    engine.scheduler.switch(build_version(0, arch, load_release(POLICY)), "in_place")
    sampler, trainer = SamplerSide(engine), TrainerSide(Actor(job_of(POLICY, dtype=dtype)))
    for seed in range(max(4 * PAIRS, 5)):
        drawn = [PROBLEMS[draw_order(seed, len(PROBLEMS), draw)] for draw in range(4)]
        prompt = [token for text in drawn for token in tokenizer.encode(text)]
        length = 64 if seed % 4 else 256
        tokens = (prompt * (length // len(prompt) + 1))[:length]
        found = await walk_sides(trainer, sampler, arch, tokens, margin=MARGINS[dtype])
        note(found, findings, f"the demo, seed {seed}, {length} tokens", dtype)
