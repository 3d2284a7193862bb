import math

import pytest
import torch
from torch import Tensor

from shared.quant.fp8 import (
    dequantise_fp8,
    e4m3_exponent,
    e4m3_values,
    power_of_two,
    quantise_fp8,
)
from tests.unit.shared.quant.twins import E4M3_POSITIVE, rounded_group, scale_exponent


def random_matrix(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(256, 256), (130, 260), (3, 5), (128, 1)])
def test_quantised_values_equal_the_slow_twin(shape: tuple[int, int]) -> None:
    weight = random_matrix(*shape)
    weight[: shape[0] // 2] *= 2**-14  # the lower codes are used, too
    values = dequantise_fp8(*quantise_fp8(weight))
    for top in range(0, shape[0], 128):
        for left in range(0, shape[1], 128):
            block = weight[top : top + 128, left : left + 128][::17, ::13]
            peak = weight[top : top + 128, left : left + 128].abs().max().item()
            slow = rounded_group(block.flatten().tolist(), 448, E4M3_POSITIVE, peak)
            fast = values[top : top + 128, left : left + 128][::17, ::13]
            assert fast.flatten().tolist() == slow


def test_scale_is_rounded_up_before_quantising() -> None:
    weight = torch.full((128, 128), 449.0)
    codes, scale = quantise_fp8(weight)
    assert scale.float().item() == 2.0
    assert codes.float().unique().tolist() == [224.0]
    assert quantise_fp8(torch.full((128, 128), 448.0))[1].float().item() == 1.0


def test_relative_error_stays_small() -> None:
    weight = random_matrix(256, 384)
    error = (dequantise_fp8(*quantise_fp8(weight)) - weight).norm() / weight.norm()
    assert error < 0.03  # a scale rounded after quantising gives 0.35


def test_exponent_is_exact_at_every_border() -> None:
    borders = [448 * 2.0**e for e in range(-120, 110)]
    peaks = [p for b in borders for p in (math.nextafter(b, 0), b, math.nextafter(b, math.inf))]
    as_float = torch.tensor(peaks, dtype=torch.float64)
    expected = [scale_exponent(peak, 448) for peak in peaks]
    assert e4m3_exponent(as_float).tolist() == expected


@pytest.mark.parametrize("exponent", [-126, -120, -30, 0, 30, 118])
def test_blocks_of_any_magnitude_survive(exponent: int) -> None:
    weight = random_matrix(128, 128) * 2.0**exponent
    error = (dequantise_fp8(*quantise_fp8(weight)).double() - weight.double()).norm()
    assert error / weight.double().norm() < 0.03


def test_zero_block_has_scale_one_and_zero_codes() -> None:
    weight = random_matrix(256, 128)
    weight[128:] = 0
    codes, scale = quantise_fp8(weight)
    assert scale.float()[1, 0] == 1
    assert not dequantise_fp8(codes, scale)[128:].any()


def test_dequantised_values_quantise_to_themselves() -> None:
    for seed in range(3):
        values = dequantise_fp8(*quantise_fp8(random_matrix(256, 200, seed=seed)))
        assert torch.equal(dequantise_fp8(*quantise_fp8(values)), values)
        assert torch.equal(values.bfloat16().float(), values)


def test_every_finite_code_has_its_value_to_the_bit() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    finite = ~expected.isnan()
    assert int(finite.sum()) == 254
    found = e4m3_values(codes)[finite]
    assert torch.equal(found.view(torch.int32), expected[finite].view(torch.int32))


def test_scales_in_fp32_mean_the_same() -> None:
    weight = random_matrix(200, 200)
    codes, scale = quantise_fp8(weight)
    same_codes, wide = quantise_fp8(weight, scale_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(codes.view(torch.uint8), same_codes.view(torch.uint8))
    assert torch.equal(dequantise_fp8(codes, scale), dequantise_fp8(same_codes, wide))


def test_e8m0_byte_is_an_exponent() -> None:
    codes = torch.ones(1, 1).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert dequantise_fp8(codes, scale).item() == 2**-7
    lowest = torch.tensor([[0]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert dequantise_fp8(codes, lowest).item() == 2.0**-127
    assert power_of_two(torch.tensor([-127, 0, 127])).tolist() == [2.0**-127, 1.0, 2.0**127]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_input_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    weight = random_matrix(256, 256)
    weight[200, 3] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.wq_a: NaN or infinity in block \(1, 0\)"):
        quantise_fp8(weight, name="layers.1.wq_a")


def test_bad_codes_and_scales_are_refused_by_name() -> None:
    codes, scale = quantise_fp8(random_matrix(128, 128))
    with pytest.raises(ValueError, match=r"w: expected scales of shape \(1, 1\), found \(2, 1\)"):
        dequantise_fp8(codes, torch.cat((scale.float(), scale.float())), name="w")
    nan_scale = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match="w: expected finite scales"):
        dequantise_fp8(codes, nan_scale, name="w")
    with pytest.raises(ValueError, match=r"w: expected scales in E8M0 or FP32, found torch\.uint8"):
        dequantise_fp8(codes, scale.view(torch.uint8), name="w")
    codes.view(torch.uint8)[5, 5] = 0xFF
    with pytest.raises(ValueError, match="w: expected finite E4M3 codes"):
        dequantise_fp8(codes, scale, name="w")
