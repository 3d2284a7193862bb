"""The committed policy before any reinforcement learning: it knows the task and often errs."""

from pathlib import Path

import torch

from scripts.arithmetic import split
from scripts.make_tiny_policy import ARCHITECTURE, NUM_HELDOUT, NUM_TRAIN
from scripts.warm_up import measure
from shared.models.deepseek_v4.checkpoint import dequantised, load_release

FOLDER = Path("assets/tiny-dsv4")


def test_policy_is_half_taught() -> None:
    torch.set_num_threads(1)
    weights = dequantised(load_release(FOLDER))
    _, heldout = split(0, num_train=NUM_TRAIN, num_heldout=NUM_HELDOUT)
    found = measure(weights, ARCHITECTURE, heldout[:32], num_samples=8, seed=11)
    assert 0.2 <= found.pass_at_1 <= 0.5
    assert found.pass_at_8 > found.pass_at_1 + 0.2
    assert found.ended_share > 0.9
