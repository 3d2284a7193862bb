"""Every code at every scale, and inputs at the borders of the formats, there and back."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.quant.fp4 import (
    dequantise_fp4,
    fp4_to_fp8,
    pack_nibbles,
    quantise_fp4,
    unpack_nibbles,
)
from shared.quant.fp8 import dequantise_fp8, power_of_two, quantise_fp8
from tests.unit.shared.quant.twins import E4M3_POSITIVE, nearest

FINITE_CODES = [code for code in range(256) if code & 0x7F != 0x7F]
EXPONENTS = [-126, -125, -119, -118, -14, -1, 0, 1, 14, 100, 118, 119]


def e8m0(exponent: int, *shape: int) -> Tensor:
    return power_of_two(torch.full(shape, exponent, dtype=torch.int32)).to(torch.float8_e8m0fnu)


def all_e4m3_codes() -> Tensor:
    return torch.tensor([FINITE_CODES], dtype=torch.uint8).view(torch.float8_e4m3fn)


def all_e2m1_pairs() -> Tensor:
    """Every byte of two codes, in groups of 32 that all have a code of 6."""
    rows = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    rows[:, 0] = 0x77
    return rows.view(torch.int8)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_every_e4m3_code_survives_at_any_scale(exponent: int) -> None:
    codes = all_e4m3_codes()[:, :128]  # one block: with 448, so that the scale is the same again
    for part in (codes, all_e4m3_codes()[:, 126:]):
        values = dequantise_fp8(part, e8m0(exponent, 1, 1))
        assert values.tolist()[0] == [float(code) * 2.0**exponent for code in part.float()[0]]
        again, scale = quantise_fp8(values)
        assert torch.equal(again.view(torch.uint8), part.contiguous().view(torch.uint8))
        assert scale.view(torch.uint8).item() == exponent + 127


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_every_pair_of_e2m1_codes_survives_at_any_scale(exponent: int) -> None:
    packed = all_e2m1_pairs()
    scale = e8m0(exponent, 256, 1)
    again, same = quantise_fp4(dequantise_fp4(packed, scale))
    assert torch.equal(again, packed)
    assert torch.equal(same.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("exponent", range(-110, 111, 10))
def test_bf16_holds_every_dequantised_value(exponent: int) -> None:
    eights = dequantise_fp8(all_e4m3_codes()[:, :128], e8m0(exponent, 1, 1))
    fours = dequantise_fp4(all_e2m1_pairs(), e8m0(exponent, 256, 1))
    for values in (eights, fours):
        assert torch.equal(values.bfloat16().float(), values)


def test_e4m3_rounds_to_nearest_even_down_to_its_subnormals() -> None:
    """Halfway between neighbours, and just beside it, with the largest code setting the scale."""
    halves = [(a + b) / 2 for a, b in pairwise(E4M3_POSITIVE)]
    beside = [half * Fraction(2**20 + d, 2**20) for half in halves for d in (-1, 0, 1)]
    for start in range(0, len(beside), 100):
        inputs = [448.0, *map(float, beside[start : start + 100])]
        found = dequantise_fp8(*quantise_fp8(torch.tensor([inputs, [-x for x in inputs]])))
        expected = [float(nearest(Fraction(x), E4M3_POSITIVE)) for x in inputs]
        assert found.tolist() == [expected, [-x for x in expected]]


def test_smallest_e4m3_number_is_kept_beside_the_largest() -> None:
    values = torch.tensor([[448.0, 2.0**-9, 2.0**-10, 2.0**-10 * 1.001, -(2.0**-9)]])
    assert dequantise_fp8(*quantise_fp8(values)).tolist() == [[448, 2**-9, 0, 2**-9, -(2**-9)]]


def test_subnormal_inputs_are_rounded_to_what_the_smallest_scale_can_hold() -> None:
    tiny = torch.tensor([[2.0**-140, -(2.0**-149), 2.0**-127, 0.0] * 32] * 128)
    eights, fours = dequantise_fp8(*quantise_fp8(tiny)), dequantise_fp4(*quantise_fp4(tiny))
    expected = torch.tensor([[0.0, 0.0, 2.0**-127, 0.0] * 32] * 128)
    assert torch.equal(eights, expected)
    assert torch.equal(fours, expected)
    tiny[0, 0] = 1.0
    assert torch.count_nonzero(dequantise_fp8(*quantise_fp8(tiny))) == 1
    assert torch.count_nonzero(dequantise_fp4(*quantise_fp4(tiny))[0, :32]) == 1


@pytest.mark.parametrize("largest", [448 * 2.0**118, 6 * 2.0**125, 2.0**127])
def test_the_largest_numbers_do_not_become_infinite(largest: float) -> None:
    values = torch.full((2, 64), largest)
    for found in (dequantise_fp8(*quantise_fp8(values)), dequantise_fp4(*quantise_fp4(values))):
        assert found.isfinite().all()
        assert (found / values - 1).abs().max() < 0.25


def test_groups_of_other_magnitude_keep_their_own_precision_in_fp4() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    small = weight.clone()
    small[:, 32:64] *= 2.0**-14
    whole, scaled = (dequantise_fp4(*quantise_fp4(one)) for one in (weight, small))
    assert torch.equal(scaled[:, 32:64], whole[:, 32:64] * 2.0**-14)
    assert torch.equal(scaled[:, :32], whole[:, :32])


def test_the_other_nibble_order_is_another_matrix_with_the_same_statistics() -> None:
    packed, scale = quantise_fp4(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    codes = unpack_nibbles(packed)
    swapped = pack_nibbles(codes.view(16, 32, 2).flip(-1).flatten(1))
    right, wrong = dequantise_fp4(packed, scale), dequantise_fp4(swapped, scale)
    assert torch.equal(right.view(16, 32, 2).flip(-1).flatten(1), wrong)
    assert not torch.equal(right, wrong)
    groups = (values.view(16, 2, 32).sort().values for values in (right, wrong))
    assert torch.equal(*groups)


def test_e8m0_byte_0_is_a_number_in_every_format() -> None:
    lowest = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = torch.full((1, 16), 0x22, dtype=torch.int8)  # 1.0 everywhere
    assert dequantise_fp4(packed, lowest).tolist() == [[2.0**-127] * 32]
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert dequantise_fp8(one, lowest).item() == 2.0**-127
    codes, scale = fp4_to_fp8(packed, lowest)
    assert torch.equal(dequantise_fp8(codes, scale), dequantise_fp4(packed, lowest))


def test_e8m0_byte_255_is_refused_by_name_in_every_format() -> None:
    infinite = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = torch.zeros(1, 16, dtype=torch.int8)  # even where all codes are zero
    for refused in (dequantise_fp4, fp4_to_fp8):
        with pytest.raises(ValueError, match="experts: expected finite scales"):
            refused(packed, infinite, name="experts")
    with pytest.raises(ValueError, match="wq_a: expected finite scales"):
        dequantise_fp8(torch.zeros(1, 1).to(torch.float8_e4m3fn), infinite, name="wq_a")


def test_fp4_zero_blocks_become_fp8_zero_blocks() -> None:
    packed, scale = quantise_fp4(torch.zeros(130, 160))
    codes, block_scale = fp4_to_fp8(packed, scale)
    assert not codes.view(torch.uint8).any()
    assert not dequantise_fp8(codes, block_scale).any()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5).map(lambda groups: 32 * groups),
    exponents=st.lists(st.integers(-100, 100), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_quantised_values_are_fixed_points_at_any_magnitude(
    rows: int, columns: int, exponents: list[int], seed: int
) -> None:
    """Values, not bytes: a block whose codes are small may take a smaller scale."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    powers = torch.tensor([2.0 ** exponents[i % len(exponents)] for i in range(rows)])
    weight = weight * powers[:, None]
    eights = dequantise_fp8(*quantise_fp8(weight))
    assert torch.equal(dequantise_fp8(*quantise_fp8(eights)), eights)
    fours = dequantise_fp4(*quantise_fp4(weight))
    assert torch.equal(dequantise_fp4(*quantise_fp4(fours)), fours)
    group_peak = weight.view(rows, -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert ((fours - weight).abs() <= group_peak / 3).all()
