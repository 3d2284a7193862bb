"""One checksum, whoever dequantises: a plain walk, or threads that run ahead of the digest."""

from pathlib import Path

import pytest
import torch

from services.rollout.engine.sglang.fingerprint import checksum_of
from services.rollout.models.deepseek_v4_weights import published
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import load_release
from shared.weights.effective import effective_checksum

RELEASE = Path("assets/tiny-dsv4")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_change_nothing(num_threads: int) -> None:
    arch, stored = Architecture.load(RELEASE), load_release(RELEASE)
    threads = torch.get_num_threads()
    values = ((name, value.numpy()) for name, value in published(arch, stored))
    expected = effective_checksum(values)
    assert checksum_of(arch, stored, num_threads=num_threads) == expected
    stored["embed.weight"] = stored["embed.weight"] + 1
    assert checksum_of(arch, stored, num_threads=num_threads) != expected
    torch.set_num_threads(threads)
