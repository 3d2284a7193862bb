"""The decode loop's rounding gives the values of the shared one, bit for bit."""

import pytest
import torch

from shared.quant.activation import quantise_indexer, quantise_kv, quantise_linear_input
from shared.quant.fast_activation import round_indexer, round_kv, round_linear_input


@pytest.mark.parametrize("width", [16, 32, 64, 128, 192, 320, 512])
@pytest.mark.parametrize("scale", [1e-9, 2.0**-14, 1.0, 300.0, 1e6])
def test_values_are_those_of_the_plain_rounding(width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(300, width, generator=generator)
    x = x * scale * torch.exp(3 * torch.randn(300, width, generator=generator))
    x[::7, ::3] = 0
    assert torch.equal(round_linear_input(x), quantise_linear_input(x))
    assert torch.equal(round_kv(x), quantise_kv(x))
    assert torch.equal(round_kv(x.view(3, 100, width)), quantise_kv(x.view(3, 100, width)))
    if width & (width - 1) == 0:
        for form in ("none", "fp8", "fp4"):
            expected = quantise_indexer(x, form=form)
            assert torch.equal(round_indexer(x, form=form), expected), form


def test_grid_points_and_ties_go_to_even() -> None:
    """One group holds the peak that makes the scale 1, then every half step of the grid."""
    steps = torch.arange(-448.0, 448.5, 0.5)
    groups = steps.split(127)
    rows = torch.stack(
        [
            torch.cat((torch.tensor([448.0]), part.new_zeros(127 - len(part)), part))
            for part in groups
        ]
    )
    rounded = round_linear_input(rows)
    assert torch.equal(rounded, rows.to(torch.float8_e4m3fn).float())
    assert torch.equal(rounded, quantise_linear_input(rows))


def test_zeros_and_tiny_values() -> None:
    zeros = torch.zeros(8, 128)
    assert torch.equal(round_linear_input(zeros), zeros)
    assert torch.equal(round_indexer(zeros, form="fp4"), zeros)
    tiny = torch.full((8, 128), 1e-30)
    assert torch.equal(round_linear_input(tiny), quantise_linear_input(tiny))
