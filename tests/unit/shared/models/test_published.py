"""One checksum, whoever digests: an engine's walk, threads, parts that are put together."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.rollout.models.deepseek_v4_weights import derive, effective, published
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import load_release
from shared.models.deepseek_v4.published import dequantised, published_digests, published_names
from shared.quant.policy import scale_name
from shared.weights.effective import effective_checksum, value_digest

RELEASE = Path("assets/tiny-dsv4")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_parts_and_threads_come_to_what_an_engine_holds(num_threads: int) -> None:
    arch, stored = Architecture.load(RELEASE), load_release(RELEASE)
    names, threads = published_names(arch), torch.get_num_threads()
    held = {name: value_digest(one.numpy()) for name, one in effective(arch, derive(arch, stored))}
    digests = {
        name: digest
        for part in (names[1::2], names[::2])
        for name, digest in published_digests(stored, part, num_threads=num_threads).items()
    }
    assert torch.get_num_threads() == threads
    assert digests == held
    assert digests == {name: value_digest(value.numpy()) for name, value in published(arch, stored)}
    checksum = effective_checksum(digests)
    for name in ("embed.weight", "layers.1.attn.wo_a.weight"):
        changed = dict(digests) | {name: "0" * 32}
        assert effective_checksum(changed) != checksum
        del changed[name]
        assert effective_checksum(changed) != checksum


def test_threads_that_start_later_compute_as_if_nothing_had_been_digested() -> None:
    """Also after a weight that is not there."""
    arch, stored = Architecture.load(RELEASE), load_release(RELEASE)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        published_digests(stored, published_names(arch)[:3], num_threads=2)
        assert threads_of_a_later_one() == 3
        with pytest.raises(KeyError):
            published_digests(stored, ["gone.weight"])
        assert threads_of_a_later_one() == 3
    finally:
        torch.set_num_threads(before)


def threads_of_a_later_one() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_values_too_small_for_a_normal_number_are_digested_as_they_are() -> None:
    """Also by a process that computes without them, as a rank does."""
    name = "layers.0.attn.wkv.weight"
    scale = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 2^-127
    stored = {name: torch.full((8, 8), 0.5).to(torch.float8_e4m3fn), scale_name(name): scale}
    values = dequantised(stored, name)
    assert (values == 2.0**-128).all()
    assert torch.set_flush_denormal(True)
    try:
        assert published_digests(stored, [name]) == {name: value_digest(values.numpy())}
    finally:
        torch.set_flush_denormal(False)
