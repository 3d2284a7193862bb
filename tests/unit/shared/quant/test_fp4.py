from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shared.quant.fp4 import (
    dequantise_fp4,
    e2m1_codes,
    e2m1_values,
    fp4_to_fp8,
    pack_nibbles,
    quantise_fp4,
    round_e2m1,
    unpack_nibbles,
)
from shared.quant.fp8 import dequantise_fp8
from tests.unit.shared.quant.twins import E2M1_POSITIVE, nearest, rounded_group


def random_matrix(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def e8m0(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def test_quantised_values_equal_the_slow_twin() -> None:
    weight = random_matrix(7, 160)
    weight[3] *= 2**-14
    values = dequantise_fp4(*quantise_fp4(weight)).view(7, 5, 32)
    for row in range(7):
        for group in range(5):
            part = weight.view(7, 5, 32)[row, group].tolist()
            slow = rounded_group(part, 6, E2M1_POSITIVE, max(map(abs, part)))
            assert values[row, group].tolist() == slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_even_code(dtype: torch.dtype) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    inputs = torch.tensor([*ties, *(-tie for tie in ties)], dtype=dtype)
    around = torch.cat((inputs, inputs * (1 - 1e-6), inputs * (1 + 1e-6)))
    around = torch.cat((around, around[:1].new_zeros(around.numel() % 2)))
    values = e2m1_values(pack_nibbles(e2m1_codes(around))).tolist()
    assert round_e2m1(around).tolist() == values
    assert values == [float(nearest(Fraction(value), E2M1_POSITIVE)) for value in around.tolist()]
    assert values[:7] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_low_nibble_is_the_even_index() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(packed), codes)
    row = torch.zeros(1, 32)
    row[0, :2] = torch.tensor([6.0, 0.5])
    assert quantise_fp4(row)[0].view(torch.uint8)[0, 0].item() == 0x17


def test_unsigned_bytes_mean_the_same() -> None:
    packed, scale = quantise_fp4(random_matrix(4, 64))
    assert torch.equal(
        dequantise_fp4(packed.view(torch.uint8), scale), dequantise_fp4(packed, scale)
    )


def test_zero_group_has_the_smallest_scale_and_zero_codes() -> None:
    weight = random_matrix(2, 64)
    weight[1, 32:] = 0
    packed, scale = quantise_fp4(weight)
    assert scale.float()[1, 1] == 2.0**-126
    assert not dequantise_fp4(packed, scale)[1, 32:].any()


def test_dequantised_values_quantise_to_themselves() -> None:
    values = dequantise_fp4(*quantise_fp4(random_matrix(64, 256)))
    assert torch.equal(dequantise_fp4(*quantise_fp4(values)), values)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    weight = random_matrix(4, 64)
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="w1: NaN or infinity in row 2, group 1"):
        quantise_fp4(weight, name="w1")


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="w1: expected K to be a multiple of 32, found 48"):
        quantise_fp4(random_matrix(4, 48), name="w1")
    packed, scale = quantise_fp4(random_matrix(4, 64))
    with pytest.raises(ValueError, match=r"w1: expected scales of shape \(4, 2\), found \(4, 1\)"):
        dequantise_fp4(packed, scale[:, :1], name="w1")
    bad = scale.view(torch.uint8).clone()
    bad[0, 0] = 255
    with pytest.raises(ValueError, match="w1: expected finite scales"):
        dequantise_fp4(packed, bad.view(torch.float8_e8m0fnu), name="w1")


@pytest.mark.parametrize("shape", [(256, 256), (130, 160)])
@pytest.mark.parametrize("spread", [0, 5, 14])
def test_fp4_to_fp8_loses_nothing_up_to_a_spread_of_14(shape: tuple[int, int], spread: int) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    packed = pack_nibbles(
        torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    )
    exponents = torch.randint(-7 - spread, -6, (rows, columns // 32), generator=generator)
    exponents[::128, ::4], exponents[1::128, ::4] = -7, -7 - spread
    scale = e8m0(exponents)
    codes, block_scale = fp4_to_fp8(packed, scale)
    assert torch.equal(dequantise_fp8(codes, block_scale), dequantise_fp4(packed, scale))
    assert codes.float().abs().max() <= 384


def test_fp4_to_fp8_names_the_block_that_would_change() -> None:
    packed = pack_nibbles(torch.ones(256, 256, dtype=torch.uint8))  # 0.5 everywhere
    exponents = torch.zeros(256, 8, dtype=torch.int32)
    exponents[200, 1] = -15
    message = r"w2: scale exponents of block \(1, 0\) differ by 15, .* up to 14"
    with pytest.raises(ValueError, match=message):
        fp4_to_fp8(packed, e8m0(exponents), name="w2")


@pytest.mark.parametrize("spread", [156, 254])
def test_fp4_to_fp8_does_not_lose_what_fp32_cannot_hold_either(spread: int) -> None:
    packed = pack_nibbles(torch.ones(128, 128, dtype=torch.uint8))
    exponents = torch.full((128, 4), 127, dtype=torch.int32)
    exponents[7, 1] = 127 - spread
    with pytest.raises(ValueError, match=rf"w2: .* of block \(0, 0\) differ by {spread}"):
        fp4_to_fp8(packed, e8m0(exponents), name="w2")


def test_fp4_to_fp8_ignores_scales_of_zero_groups() -> None:
    weight = random_matrix(128, 128)
    weight[5, 32:64] = 0
    packed, scale = quantise_fp4(weight)
    codes, block_scale = fp4_to_fp8(packed, scale)
    assert torch.equal(dequantise_fp8(codes, block_scale), dequantise_fp4(packed, scale))
