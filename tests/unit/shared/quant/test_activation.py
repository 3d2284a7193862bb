import math

import pytest
import torch
from torch import Tensor

from shared.quant.activation import (
    fake_e2m1,
    fake_e4m3,
    hadamard,
    quantise_indexer,
    quantise_kv,
    quantise_linear_input,
)
from tests.unit.shared.quant.twins import E2M1_POSITIVE, E4M3_POSITIVE, rounded_group

DTYPES = [torch.float32, torch.float64]


def uneven(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian, but every second 32 channels are 2^-14 as large: group sizes become visible."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    small = (torch.arange(shape[-1]) // 32) % 2 == 1
    return torch.where(small, x * 2**-14, x)


def slow_e4m3(row: list[float], group: int) -> list[float]:
    result = []
    for start in range(0, len(row), group):
        part = row[start : start + group]
        result += rounded_group(part, 448, E4M3_POSITIVE, max(1e-4, *map(abs, part)))
    return result


def slow_e2m1(row: list[float]) -> list[float]:
    result = []
    for start in range(0, len(row), 32):
        part = row[start : start + 32]
        result += rounded_group(part, 6, E2M1_POSITIVE, max(map(abs, part)))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("width", [128, 192, 100])
def test_e4m3_equals_the_slow_twin(width: int, group: int, dtype: torch.dtype) -> None:
    x = uneven(3, width, dtype=dtype)
    rounded = fake_e4m3(x, group=group)
    assert rounded.dtype == dtype
    assert rounded.tolist() == [slow_e4m3(row, group) for row in x.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_e2m1_equals_the_slow_twin(dtype: torch.dtype) -> None:
    x = uneven(4, 96, dtype=dtype)
    slow = [slow_e2m1(row) for row in x.tolist()]
    assert fake_e2m1(x, group=32).tolist() == slow


def test_each_hook_has_its_own_group() -> None:
    x = uneven(2, 256)
    assert torch.equal(quantise_linear_input(x), fake_e4m3(x, group=128))
    assert torch.equal(quantise_kv(x), fake_e4m3(x, group=64))
    assert torch.equal(quantise_indexer(x, form="fp8"), fake_e4m3(hadamard(x), group=128))
    assert torch.equal(quantise_indexer(x, form="fp4"), fake_e2m1(hadamard(x), group=32))
    assert quantise_indexer(x, form="none") is x
    assert not torch.equal(fake_e4m3(x, group=32), fake_e4m3(x, group=64))
    scaled = torch.cat((x[:, ::2], x[:, ::2] * 2**-14), -1)  # groups of 64 and 128 differ
    assert not torch.equal(fake_e4m3(scaled, group=64), fake_e4m3(scaled, group=256))


def test_floor_decides_the_scale_of_tiny_groups() -> None:
    x = torch.full((1, 64), 1e-9)
    step = 2.0 ** math.ceil(math.log2(1e-4 / 448)) * 2**-9
    assert fake_e4m3(x, group=64).unique().item() == round(1e-9 / step) * step
    assert fake_e4m3(torch.zeros(1, 64), group=64).abs().max() == 0
    assert fake_e2m1(torch.zeros(1, 64), group=32).abs().max() == 0


def test_rounding_twice_changes_nothing() -> None:
    x = uneven(5, 128)
    for rounding, group in ((fake_e4m3, 64), (fake_e2m1, 32)):
        once = rounding(x, group=group)
        assert torch.equal(rounding(once, group=group), once)


def test_gradient_passes_straight_through() -> None:
    x = uneven(2, 100).requires_grad_()
    weight = torch.randn(2, 100)
    (fake_e4m3(x, group=64) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_hadamard_equals_its_definition_and_is_its_own_inverse(n: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).double()
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    slow = x @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(n)
    assert torch.allclose(hadamard(x), slow, rtol=0, atol=1e-13)
    assert torch.allclose(hadamard(hadamard(x)), x, rtol=0, atol=1e-13)


def test_hadamard_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="96 is not a power of two"):
        hadamard(torch.zeros(1, 96))
