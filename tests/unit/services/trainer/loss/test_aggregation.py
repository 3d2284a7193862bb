import math

import pytest
import torch

from services.trainer.loss.aggregation import token_coefficients, usable_logprobs

NAMES = ["token_mean", "sequence_mean", "fixed_length"]


def test_unusable_logprobs_are_found() -> None:
    values = torch.tensor([-1.0, 0.0, 5e-5, 0.1, math.nan, math.inf, -math.inf])
    assert usable_logprobs(values).tolist() == [True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("aggregation", "usable", "lengths", "expected"),
    [
        ("token_mean", [1, 1, 0, 1], [3, 1], [1 / 3, 1 / 3, 0, 1 / 3]),
        ("sequence_mean", [1, 1, 0, 1, 0], [3, 1, 1], [0.25, 0.25, 0, 0.5, 0]),
        ("fixed_length", [1, 1, 0, 1, 0], [3, 1, 1], [0.05, 0.05, 0, 0.05, 0]),
    ],
)
def test_coefficients_by_hand(
    aggregation: str, usable: list[int], lengths: list[int], expected: list[float]
) -> None:
    """The denominator follows the mask: neither an unusable token nor a sample of such counts."""
    found = token_coefficients(
        torch.tensor(usable, dtype=torch.bool), torch.tensor(lengths), aggregation, max_tokens=10
    )
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("aggregation", NAMES)
def test_nothing_usable_gives_zero_coefficients(aggregation: str) -> None:
    usable = torch.zeros(3, dtype=torch.bool)
    found = token_coefficients(usable, torch.tensor([2, 1]), aggregation, max_tokens=10)
    assert found.tolist() == [0, 0, 0]


def test_tokens_are_counted_beyond_what_fp32_can_count() -> None:
    """A running FP32 sum of ones stops at 2^24."""
    number = 2**24 + 2**21
    usable = torch.ones(1, dtype=torch.bool).expand(number)
    found = token_coefficients(usable, torch.tensor([number]), "sequence_mean", max_tokens=1)
    assert found[0].item() == pytest.approx(1 / number, rel=1e-6)
