"""The fused kernels on the device: every boundary case, refusals by name, bandwidth."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.quant import fp4, fp8
from shared.weights.delta import encode_delta
from shared.weights.tensor_delta import encode_tensor_delta
from tests.gpu.bandwidth import copy_speed, num_bytes, rate
from tests.kernel_cases import cases, equal

LEAST_SHARE = 0.7  # of the copy bandwidth
LARGE = (32768, 16384)
GROUPED = (4096, 256, 4096)  # expert matrices of one launch
CASES = cases() if torch.cuda.is_available() else {"all": lambda device: None}

Figures = dict[str, Any]


@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_the_bytes_of_the_plain_code(name: str) -> None:
    CASES[name]("cuda")


@pytest.mark.parametrize("shape", [(1000, 4096), (9, 256, 4096)])
def test_public_functions_give_the_same_bytes_on_both_devices(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).bfloat16()
    for quantise, dequantise in (
        (fp8.quantise_fp8, fp8.dequantise_fp8),
        (fp4.quantise_fp4, fp4.dequantise_fp4),
    ):
        here, there = quantise(weight), quantise(weight.cuda())
        for one, two in zip(here, there, strict=True):
            equal(one, two)
        equal(dequantise(*here), dequantise(*there))
    codes = fp4.unpack_nibbles(here[0])
    equal(codes, fp4.unpack_nibbles(there[0]))
    equal(here[0], fp4.pack_nibbles(codes.cuda()))


def test_refusals_are_worded_as_on_the_cpu() -> None:
    weight = torch.randn(3, 256, 256, device="cuda")
    weight[2, 200, 3] = math.nan
    with pytest.raises(ValueError, match=r"w1: NaN or infinity in block \(2, 1, 0\)"):
        fp8.quantise_fp8(weight, name="w1")
    with pytest.raises(ValueError, match=r"w1: NaN or infinity in row \(2, 200\), group 0"):
        fp4.quantise_fp4(weight, name="w1")
    codes, scale = fp8.quantise_fp8(torch.randn(128, 128, device="cuda"))
    codes.view(torch.uint8)[5, 5] = 0xFF
    with pytest.raises(ValueError, match="w1: expected finite E4M3 codes"):
        fp8.dequantise_fp8(codes, scale, name="w1")
    packed, scale = fp4.quantise_fp4(torch.randn(128, 128, device="cuda"))
    scale.view(torch.uint8)[5, 3] = 255
    with pytest.raises(ValueError, match="w1: expected finite scales"):
        fp4.dequantise_fp4(packed, scale, name="w1")


@pytest.mark.parametrize("share", [0.003, 0.03, 0.5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_delta_of_a_large_tensor_is_that_of_its_bytes(dtype: torch.dtype, share: float) -> None:
    base, new = changed(3_000_000, dtype, share)
    found = encode_tensor_delta(base, new)
    raw = [tensor.cpu().view(torch.uint8).numpy() for tensor in (base, new)]
    assert found == encode_delta(*raw, item_bytes=dtype.itemsize)


@pytest.mark.parametrize("shape", [LARGE, GROUPED], ids=["large", "grouped"])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_quantisation_is_as_fast_as_memory(
    shape: tuple[int, ...], form: str, figures: Figures
) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    quantise = fp8.quantise_fp8 if form == "fp8" else fp4.quantise_fp4
    plain = fp8.plain_quantise_fp8 if form == "fp8" else fp4.plain_quantise_fp4
    found = quantise(weight)
    part = weight[..., -1024:, :]
    for one, two in zip(plain(part[-4:]), quantise(part[-4:]), strict=True):
        equal(one, two)
    size = num_bytes(weight, *found)
    del found
    _keep(figures, f"quantise {form}", shape, lambda: quantise(weight), size)


@pytest.mark.parametrize("shape", [LARGE, GROUPED], ids=["large", "grouped"])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_dequantisation_is_as_fast_as_memory(
    shape: tuple[int, ...], form: str, figures: Figures
) -> None:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    pair = fp8.quantise_fp8(weight) if form == "fp8" else fp4.quantise_fp4(weight)
    del weight
    dequantise: Callable[..., Tensor]
    dequantise = fp8.dequantise_fp8 if form == "fp8" else fp4.dequantise_fp4
    size = num_bytes(*pair) + 4 * math.prod(shape)
    _keep(figures, f"dequantise {form}", shape, lambda: dequantise(*pair), size)


@pytest.mark.parametrize("shape", [LARGE, GROUPED], ids=["large", "grouped"])
def test_packing_is_as_fast_as_memory(shape: tuple[int, ...], figures: Figures) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda")
    packed = fp4.pack_nibbles(codes)
    assert torch.equal(fp4.unpack_nibbles(packed), codes)
    size = num_bytes(codes, packed)
    _keep(figures, "pack fp4", shape, lambda: fp4.pack_nibbles(codes), size)
    _keep(figures, "unpack fp4", shape, lambda: fp4.unpack_nibbles(packed), size)


@pytest.mark.parametrize(
    ("dtype", "share", "least"),
    [
        (torch.uint8, 0.003, LEAST_SHARE),
        (torch.bfloat16, 0.003, LEAST_SHARE),
        (torch.bfloat16, 0.03, LEAST_SHARE),
        # Every ninth word has changed: words that are kept between the passes are a third of the
        # bytes more, and 0.66 to 0.67 was measured.
        (torch.uint8, 0.03, 0.6),
    ],
)
def test_changes_are_found_fast(
    dtype: torch.dtype, share: float, least: float, figures: Figures
) -> None:
    from shared.quant.kernels.changes import find_changes

    base, new = changed((1 << 30) // dtype.itemsize, dtype, share)
    found = find_changes(base, new)
    assert found is not None
    size = num_bytes(base, new, found.at, found.old, found.new)
    name = f"changes {dtype} at {share}".replace("torch.", "")
    run = partial(find_changes, base, new)
    _keep(figures, name, tuple(base.shape), run, size, least=least)


def test_one_expert_matrix_at_a_time_for_comparison(figures: Figures) -> None:
    """No bound: this is why matrices go in stacks."""
    weight = torch.randn(GROUPED[1:], device="cuda", dtype=torch.bfloat16)
    codes, scale = fp8.quantise_fp8(weight)
    size = num_bytes(weight, codes, scale)
    found = rate(lambda: fp8.quantise_fp8(weight), num_bytes=size)
    plain = rate(lambda: fp8.plain_quantise_fp8(weight), num_bytes=size)
    figures.setdefault("kernels", {})["quantise fp8, one matrix"] = found.as_dict()
    figures["kernels"]["quantise fp8, one matrix, plain torch"] = plain.as_dict()


def test_plain_code_on_the_device_for_comparison(figures: Figures) -> None:
    """No bound: what the kernels are measured against."""
    weight = torch.randn(LARGE, device="cuda", dtype=torch.bfloat16)
    for form, plain in (("fp8", fp8.plain_quantise_fp8), ("fp4", fp4.plain_quantise_fp4)):
        size = num_bytes(weight, *plain(weight))
        found = rate(lambda plain=plain: plain(weight), num_bytes=size)  # type: ignore[misc]
        figures.setdefault("kernels", {})[f"quantise {form}, plain torch"] = found.as_dict()


def changed(count: int, dtype: torch.dtype, share: float) -> tuple[Tensor, Tensor]:
    """`count` elements of random bytes, and the same with a share of them one step away."""
    width = dtype.itemsize
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    base = torch.randint(0, 256, (count * width,), dtype=torch.uint8, device="cuda").view(raw)
    new = base + (torch.rand(count, device="cuda") < share).to(raw)
    return base.view(dtype), new.view(dtype)


def _keep(
    figures: Figures,
    name: str,
    shape: tuple[int, ...],
    run: Callable[[], object],
    size: int,
    *,
    least: float = LEAST_SHARE,
) -> None:
    found = rate(run, num_bytes=size)
    kept = figures.setdefault("kernels", {})
    kept["copy_gigabytes_per_s"] = round(copy_speed(), 1)
    kept[f"{name}, {' x '.join(map(str, shape))}"] = found.as_dict()
    assert found.share_of_copy >= least, found
