"""Boundary cases of the fused kernels, each against the plain code on the CPU, bit by bit.

A GPU runs them as they are; elsewhere Triton's interpreter does, in a process of its own:
`TRITON_INTERPRET=1 python -m tests.kernel_cases` prints what failed as JSON.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from shared.quant.fp4 import (
    plain_dequantise_fp4,
    plain_pack_nibbles,
    plain_quantise_fp4,
    plain_unpack_nibbles,
)
from shared.quant.fp8 import plain_dequantise_fp8, plain_quantise_fp8
from shared.quant.kernels import changes, fp4, fp8
from shared.weights.delta import encode_changes, encode_delta
from shared.weights.tensor_delta import in_runs

Case = Callable[[str], None]
FLOATS = (torch.float32, torch.bfloat16)
E8M0 = torch.float8_e8m0fnu


def cases() -> dict[str, Case]:
    """By name; each takes a device and raises AssertionError."""
    found = dict(_fp8_cases()) | dict(_fp4_cases()) | dict(_delta_cases())
    return {name.replace("torch.", ""): case for name, case in found.items()}


def equal(expected: Tensor, found: Tensor) -> None:
    """Same dtype, shape and bytes: 0 is not -0, and a NaN equals itself."""
    assert expected.dtype == found.dtype, (expected.dtype, found.dtype)
    assert expected.shape == found.shape, (expected.shape, found.shape)
    one, two = (t.cpu().contiguous().flatten().view(torch.uint8) for t in (expected, found))
    differing = int((one != two).sum())
    assert differing == 0, f"{differing} of {one.numel()} bytes differ"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _fp8_cases() -> Iterator[tuple[str, Case]]:
    for shape, dtype in product([(256, 256), (130, 260), (3, 5), (128, 1), (1, 128)], FLOATS):
        values = random(*shape)
        values[: shape[0] // 2] *= 2**-14
        yield f"fp8 {shape} {dtype}", _fp8(values.to(dtype))
    yield "fp8 scales made in fp32", _fp8(random(130, 140), scale_dtype=torch.float32)
    yield "fp8 stack", _fp8(random(2, 2, 130, 120).bfloat16())
    yield "fp8 stack of one block", _fp8(random(5, 128, 128))
    yield "fp8 transposed", _fp8(random(130, 120).t())
    yield "fp8 strided", _fp8(random(4, 2, 130, 120)[::2, 1, :, 3:-5])
    yield "fp8 nothing", _fp8(random(0, 128))
    zeros = random(256, 128)
    zeros[128:] = 0
    zeros[130] = -0.0
    yield "fp8 zero block", _fp8(zeros)
    yield "fp8 ties", _fp8(_around_ties(_e4m3_grid(), 448))
    yield "fp8 scale borders", _fp8(_around_borders(448, (1, 1)))
    yield "fp8 subnormal input", _fp8(random(4, 128, 128) * _powers(-149, -140, -132, -126))
    yield "fp8 largest input", _fp8(random(2, 128, 128).clamp(-1, 1) * _powers(127, 126))
    yield "fp8 every bf16", _fp8(_every_finite_bf16())
    for bad in (math.nan, math.inf, -math.inf):
        yield f"fp8 refuses {bad}", _refuses(_with(random(3, 130, 140), (2, 129, 139), bad))
    yield "fp8 every code and scale", _fp8_values(_every_fp8_code(), _scales(range(255))[None])
    wide = torch.tensor([[3.7, -0.1, 2.0**-149, 2.0**-130, 3e38, 0.0]])
    yield "fp8 scales in fp32", _fp8_values(_every_fp8_code()[:, : 128 * 6], wide)
    codes = random(3, 130, 140).to(torch.float8_e4m3fn)
    yield "fp8 values of a stack", _fp8_values(codes, torch.rand(3, 2, 2))
    for place in ((0, 0), (129, 139)):
        yield f"fp8 refuses NaN code at {place}", _refuses_code(place)
    yield "fp8 refuses E8M0 255", _refuses_scale(fp8, _scales([255]))
    for bad in (math.nan, math.inf):
        yield f"fp8 refuses scale {bad}", _refuses_scale(fp8, torch.tensor([bad]))


def _fp4_cases() -> Iterator[tuple[str, Case]]:
    for shape, dtype in product([(7, 160), (256, 64), (1, 32), (2, 3, 5, 96)], FLOATS):
        values = random(*shape)
        values[:1] *= 2**-14
        yield f"fp4 {shape} {dtype}", _fp4(values.to(dtype))
    yield "fp4 strided", _fp4(random(6, 2, 130, 160)[::2, 1, :, 32:-32])
    yield "fp4 nothing", _fp4(random(0, 64))
    yield "fp4 zero groups", _fp4(torch.tensor([0.0, -0.0, 0.0, 1.0]).repeat_interleave(32)[None])
    yield "fp4 ties", _fp4(_around_ties(torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]), 6))
    yield "fp4 scale borders", _fp4(_around_borders(6, (32, 1)).transpose(-1, -2).contiguous())
    tiny = random(4, 128, 128) * _powers(-149, -140, -130, -126)
    yield "fp4 subnormal input", _fp4(tiny)
    yield "fp4 every bf16", _fp4(_every_finite_bf16())
    for bad in (math.nan, math.inf, -math.inf):
        yield f"fp4 refuses {bad}", _refuses_fp4(_with(random(130, 160), (129, 159), bad))
    packed = torch.arange(256, dtype=torch.uint8).repeat(255, 1).view(torch.int8)
    yield (
        "fp4 every byte and scale",
        _fp4_values(packed, _scales(range(255))[:, None].expand(-1, 16)),
    )
    wide = torch.tensor([3.7, -0.1, 2.0**-149, 0.0])[:, None].repeat(1, 16)
    yield "fp4 scales in fp32", _fp4_values(packed[:4].view(torch.uint8), wide)
    yield "fp4 refuses E8M0 255", _refuses_scale(fp4, _scales([255]))
    yield "fp4 refuses scale inf", _refuses_scale(fp4, torch.tensor([math.inf]))
    for shape in ((3, 2), (5, 9000), (0, 4)):
        yield f"fp4 nibbles {shape}", _nibbles(shape)


def _delta_cases() -> Iterator[tuple[str, Case]]:
    odd = 3 * changes.CHUNK_WORDS + 4
    for width, count in product((1, 2, 4), (4, 4096, 16384, odd)):
        yield f"delta {count} x {width}", _delta(width, count, 0.03)
    for share in (0.0, 0.003):
        yield f"delta at {share}", _delta(1, odd, share)
    yield "delta of two runs", _delta(1, (1 << 20) + 128, 0.01)
    for width in (1, 2, 4):
        yield f"delta dense of width {width}", _dense(width)
    yield "delta of an eighth", _many
    yield "delta of nothing", _delta(1, 0, 0.0)


def _fp8(weight: Tensor, *, scale_dtype: torch.dtype = E8M0) -> Case:
    def check(device: str) -> None:
        expected = plain_quantise_fp8(weight, scale_dtype=scale_dtype)
        for software in {True, fp8.INTERPRETED}:
            found = fp8.quantise(weight.to(device), scale_dtype=scale_dtype, software=software)
            assert found is not None
            for one, two in zip(expected, found, strict=True):
                equal(one, two)
        _fp8_values(*expected)(device)

    return check


def _fp8_values(codes: Tensor, scale: Tensor) -> Case:
    def check(device: str) -> None:
        found = fp8.dequantise(codes.to(device), scale.to(device))
        assert found is not None
        equal(plain_dequantise_fp8(codes, scale), found)

    return check


def _fp4(weight: Tensor) -> Case:
    def check(device: str) -> None:
        expected = plain_quantise_fp4(weight)
        found = fp4.quantise(weight.to(device))
        assert found is not None
        for one, two in zip(expected, found, strict=True):
            equal(one, two)
        _fp4_values(*expected)(device)

    return check


def _fp4_values(packed: Tensor, scale: Tensor) -> Case:
    def check(device: str) -> None:
        found = fp4.dequantise(packed.to(device), scale.to(device))
        assert found is not None
        equal(plain_dequantise_fp4(packed, scale), found)

    return check


def _nibbles(shape: tuple[int, int]) -> Case:
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(0))

    def check(device: str) -> None:
        packed = plain_pack_nibbles(codes.to(torch.uint8))
        equal(packed, fp4.pack(codes.to(torch.uint8).to(device)))
        equal(plain_unpack_nibbles(packed), fp4.unpack(packed.to(device)))

    return check


def _refuses(weight: Tensor) -> Case:
    def check(device: str) -> None:
        assert fp8.quantise(weight.to(device), scale_dtype=E8M0) is None

    return check


def _refuses_fp4(weight: Tensor) -> Case:
    def check(device: str) -> None:
        assert fp4.quantise(weight.to(device)) is None

    return check


def _refuses_code(place: tuple[int, int]) -> Case:
    def check(device: str) -> None:
        for code in (0x7F, 0xFF):
            codes = torch.zeros(130, 140, dtype=torch.uint8)
            codes[place] = code
            scale = torch.ones(2, 2)
            assert (
                fp8.dequantise(codes.view(torch.float8_e4m3fn).to(device), scale.to(device)) is None
            )

    return check


def _refuses_scale(kernels: object, bad: Tensor) -> Case:
    scale = torch.ones(4, 1).to(bad.dtype)
    scale.view(torch.uint8 if bad.dtype == E8M0 else torch.int32)[2, 0] = bad.view(
        torch.uint8 if bad.dtype == E8M0 else torch.int32
    )[0]

    def check(device: str) -> None:
        if kernels is fp8:
            codes = torch.zeros(500, 1).to(torch.float8_e4m3fn)
            assert fp8.dequantise(codes.to(device), scale.to(device)) is None
        else:
            packed = torch.zeros(4, 16, dtype=torch.int8)
            assert fp4.dequantise(packed.to(device), scale.to(device)) is None

    return check


def _delta(width: int, count: int, share: float) -> Case:
    base, new = _changed(width, count, share)

    def check(device: str) -> None:
        kind = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[width]
        one, two = (torch.from_numpy(a.view(np.uint8)).view(kind).to(device) for a in (base, new))
        assert changes.supports(one)
        found = changes.find_changes(one, two)
        assert found is not None
        at, old, now = (t.cpu().numpy() for t in (found.at, found.old, found.new))
        places = np.flatnonzero(base != new)
        assert np.array_equal(at, places), f"{len(at)} changes instead of {len(places)}"
        old, now = old.view(base.dtype), now.view(base.dtype)
        assert np.array_equal(old, base[places])
        assert np.array_equal(now, new[places])
        coded = encode_changes(
            in_runs(at, old, now, count), item_bytes=width, num_items=count, max_share=100
        )
        assert coded == encode_delta(base, new, item_bytes=width, max_share=100)

    return check


def _dense(width: int) -> Case:
    """As many words of a chunk as it has slots, then one more."""

    def check(device: str) -> None:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
        chunk = changes.CHUNK_WORDS * 4 // width
        base = torch.zeros(8 * chunk, dtype=kind, device=device)
        new = base.clone()
        new[3 * chunk + 7 * 4 // width :][:: 4 // width][: changes.SLOTS] = 1
        found = changes.find_changes(base, new)
        assert found is not None
        assert len(found.at) == changes.SLOTS
        new[3 * chunk] = 1
        assert changes.find_changes(base, new) is None

    return check


def _many(device: str) -> None:
    """As many elements as there is room for, an eighth of all, then one more."""
    base = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    new = base.clone()
    new.view(-1, 64)[:, :8] = 1
    found = changes.find_changes(base, new)
    assert found is not None
    assert len(found.at) == 1 << 17
    new[9] = 1
    assert changes.find_changes(base, new) is None


def _changed(width: int, count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last element always change if any does."""
    generator = np.random.default_rng(count + width)
    dtype = np.dtype(f"<u{width}")
    base = generator.integers(0, 256, count * width, dtype=np.uint8).view(dtype)
    moved = generator.random(count) < share
    if share:
        moved[[0, -1]] = True
    new = base.copy()
    steps = generator.choice([1, -1, 3, 200], int(moved.sum()))
    new[moved] += steps.astype(dtype)
    return base, new


def _e4m3_grid() -> Tensor:
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _around_ties(grid: Tensor, largest: float) -> Tensor:
    """Halves between neighbours of a format with the numbers beside them, under several scales."""
    halves = (grid[1:] + grid[:-1]) / 2
    lower, upper = halves.nextafter(grid[:-1]), halves.nextafter(grid[1:])
    row = torch.cat([grid, halves, lower, upper])
    row = torch.cat([row, -row])
    row = torch.cat([row, torch.zeros(-len(row) % 31)]).view(-1, 31)
    # The largest value goes first in every 32, so that the scale of block and group is known.
    row = torch.cat([torch.full((len(row), 1), float(largest)), row], 1).flatten()
    return row[None, None, :] * _powers(0, -14, 90)


def _around_borders(largest: float, shape: tuple[int, int]) -> Tensor:
    """One tensor of `shape` for each number beside largest · 2^e."""
    exponents = torch.tensor([-140, -136, -135, -134, -127, -126, -125, -1, 0, 1, 109, 118])
    border = (largest * 2.0 ** exponents.double()).float()
    infinity = torch.tensor(math.inf)
    peaks = torch.cat([border, border.nextafter(infinity), border.nextafter(-infinity)])
    return peaks[:, None, None].expand(-1, *shape).contiguous()


def _every_finite_bf16() -> Tensor:
    bits = torch.cat([torch.arange(0x7F80), torch.arange(0x8000, 0xFF80)])
    if fp8.INTERPRETED:  # it widens subnormal BF16 numbers wrongly
        bits[bits & 0x7F80 == 0] = 0
    return bits.to(torch.uint16).view(torch.bfloat16).view(510, 128)


def _every_fp8_code() -> Tensor:
    """[128, 255 blocks of 128]: every finite code in every block."""
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    column = torch.tensor(finite, dtype=torch.uint8)
    block = column.repeat(65)[: 128 * 128].view(128, 128)
    return block.repeat(1, 255).view(torch.float8_e4m3fn)


def _scales(exponents: range | list[int]) -> Tensor:
    return torch.tensor(list(exponents), dtype=torch.uint8).view(E8M0)


def _powers(*exponents: int) -> Tensor:
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float64).float()[:, None, None]


def _with(values: Tensor, place: tuple[int, ...], bad: float) -> Tensor:
    values[place] = bad
    return values


def main() -> None:
    failed = {}
    for name, case in cases().items():
        try:
            case("cpu")
            failed[name] = ""
        except AssertionError as err:
            failed[name] = str(err) or "differs"
    json.dump(failed, sys.stdout)


if __name__ == "__main__":
    main()
