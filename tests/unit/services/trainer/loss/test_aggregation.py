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


def slow_coefficients(
    usable: list[bool], lengths: list[int], aggregation: str, max_tokens: int
) -> list[float]:
    """Sample by sample: what share of the loss each of its tokens is."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    samples = [usable[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    counting = [sample for sample in samples if any(sample)]
    found = []
    for sample in samples:
        share = {
            "token_mean": lambda _: 1 / sum(usable),
            "sequence_mean": lambda one: 1 / len(counting) / sum(one),
            "fixed_length": lambda _: 1 / len(counting) / max_tokens,
        }[aggregation]
        found += [share(sample) if counts else 0.0 for counts in sample]
    return found


@pytest.mark.parametrize("aggregation", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_coefficients_equal_their_slow_twin(aggregation: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (20,), generator=generator)
    usable = torch.rand(int(lengths.sum()), generator=generator) < 0.6
    usable[: int(lengths[:3].sum())] = False  # whole samples without a usable token
    found = token_coefficients(usable, lengths, aggregation, max_tokens=12)
    expected = slow_coefficients(usable.tolist(), lengths.tolist(), aggregation, 12)
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64))
    if aggregation != "fixed_length":
        assert found.double().sum().item() == pytest.approx(1.0, abs=1e-6)


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
