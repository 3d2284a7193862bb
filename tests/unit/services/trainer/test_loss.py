"""Losses against hand-computed values, slow twins and finite differences."""

import math

import pytest
import torch
from torch import Tensor

from services.trainer.loss import (
    Clipping,
    TokenBatch,
    clipped_surrogate,
    drift_metrics,
    kl_k3,
    policy_loss,
    token_coefficients,
    truncated_weights,
    usable_logprobs,
)

CLIPPING = Clipping(low=0.2, high=0.3)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_surrogate_by_hand() -> None:
    new, old = logs(0.5, 0.5, 0.2, 0.2), logs(0.25, 0.25, 0.4, 0.4)  # ratios 2, 2, 0.5, 0.5
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    per_token, clipped = clipped_surrogate(new, old, advantages, CLIPPING)
    torch.testing.assert_close(per_token, torch.tensor([-1.3, 2.0, -0.5, 0.8], dtype=torch.float64))
    assert clipped.tolist() == [True, False, False, True]


def test_clipped_tokens_have_no_gradient() -> None:
    new = logs(0.5, 0.2).requires_grad_()
    per_token, _ = clipped_surrogate(new, logs(0.25, 0.4), torch.tensor([1.0, -1.0]), CLIPPING)
    per_token.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0]


def test_truncated_weights_by_hand() -> None:
    weights = truncated_weights(logs(0.5, 0.3, 0.1), logs(0.1, 0.2, 0.4), 2.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.5, 0.25], dtype=torch.float64))


def test_k3_by_hand_and_never_negative() -> None:
    expected = 0.5 - 1 - math.log(0.5)
    torch.testing.assert_close(kl_k3(logs(0.4), logs(0.2)).item(), expected)
    noise = torch.randn(1000, dtype=torch.float64)
    assert (kl_k3(noise, noise.flip(0)) >= 0).all()


def test_k3_is_an_unbiased_estimate_of_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    mean = (p * kl_k3(p.log(), q.log())).sum()
    torch.testing.assert_close(mean, (p * (p / q).log()).sum())


def test_unusable_logprobs_are_found() -> None:
    values = torch.tensor([-1.0, 0.0, 5e-5, 0.1, math.nan, math.inf, -math.inf])
    assert usable_logprobs(values).tolist() == [True, True, True, False, False, False, False]


def test_token_mean_coefficients_by_hand() -> None:
    usable = torch.tensor([True, True, False, True])
    coefficients = token_coefficients(usable, torch.tensor([3, 1]), "token_mean")
    torch.testing.assert_close(coefficients, torch.tensor([1 / 3, 1 / 3, 0, 1 / 3]))


def test_sequence_mean_coefficients_by_hand() -> None:
    usable = torch.tensor([True, True, False, True, False])
    coefficients = token_coefficients(usable, torch.tensor([3, 1, 1]), "sequence_mean")
    torch.testing.assert_close(coefficients, torch.tensor([0.25, 0.25, 0, 0.5, 0]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_nothing_usable_gives_zero_coefficients(aggregation: str) -> None:
    coefficients = token_coefficients(
        torch.zeros(3, dtype=torch.bool), torch.tensor([2, 1]), aggregation
    )  # type: ignore[arg-type]
    assert coefficients.tolist() == [0, 0, 0]


def random_batch(size: int, *, old: bool) -> tuple[Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(3)

    def noise() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    new = -1 - noise().abs()
    coefficients = torch.full((size,), 1 / (size - 1), dtype=torch.float64)
    coefficients[2] = 0
    sampler = new + 0.5 * noise()
    sampler[2] = math.nan
    batch = TokenBatch(new + 0.3 * noise() if old else None, sampler, noise(), coefficients)
    return new, batch


def slow_loss(new: Tensor, batch: TokenBatch, cap: float | None) -> float:
    """One token at a time, in plain Python."""
    total = 0.0
    for i, coefficient in enumerate(batch.coefficients.tolist()):
        if coefficient == 0:
            continue
        old = new[i].item() if batch.old is None else batch.old[i].item()
        ratio, advantage = math.exp(new[i].item() - old), batch.advantages[i].item()
        bounded = min(max(ratio, 1 - CLIPPING.low), 1 + CLIPPING.high)
        weight = 1.0 if cap is None else min(math.exp(old - batch.sampler[i].item()), cap)
        total += -min(ratio * advantage, bounded * advantage) * weight * coefficient
    return total


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("old", [False, True])
def test_policy_loss_equals_its_slow_twin(old: bool, cap: float | None) -> None:
    new, batch = random_batch(50, old=old)
    loss = policy_loss(new, batch, clipping=CLIPPING, tis_cap=cap)
    assert loss.total.item() == pytest.approx(slow_loss(new, batch, cap), rel=1e-12)
    assert not loss.clipped[2]


def test_policy_loss_gradient() -> None:
    new, batch = random_batch(20, old=True)
    new.requires_grad_()

    def total(new: Tensor) -> Tensor:
        return policy_loss(new, batch, clipping=CLIPPING, tis_cap=1.5).total

    assert torch.autograd.gradcheck(total, (new,))
    total(new).backward()
    assert new.grad is not None
    assert new.grad[2] == 0


def test_first_update_is_the_policy_gradient() -> None:
    """With old = new the ratio is 1 and the gradient of a token is -A · w · coefficient."""
    new, batch = random_batch(20, old=False)
    new.requires_grad_()
    policy_loss(new, batch, clipping=CLIPPING, tis_cap=1.5).total.backward()
    weights = truncated_weights(new, batch.sampler, 1.5)
    expected = (-batch.advantages * weights * batch.coefficients).nan_to_num()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, expected)


def test_losses_of_pieces_add_up_to_the_whole() -> None:
    new, batch = random_batch(30, old=True)
    assert batch.old is not None
    whole = policy_loss(new, batch, clipping=CLIPPING, tis_cap=2.0).total
    pieces = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 7), slice(7, 30)):
        piece = TokenBatch(
            batch.old[part], batch.sampler[part], batch.advantages[part], batch.coefficients[part]
        )
        pieces += policy_loss(new[part], piece, clipping=CLIPPING, tis_cap=2.0).total
    torch.testing.assert_close(pieces, whole)


def test_drift_metrics_by_hand() -> None:
    old, sampler = logs(0.5, 0.2, 0.9), logs(0.25, 0.2, 0.1)
    metrics = drift_metrics(old, sampler, torch.tensor([True, True, False]))
    assert metrics["delta_logprob_mean"] == pytest.approx(math.log(2) / 2)
    assert metrics["delta_logprob_max"] == pytest.approx(math.log(2))
    assert metrics["delta_logprob_p99"] == pytest.approx(0.99 * math.log(2))
    assert metrics["approx_kl"] == pytest.approx((2 - 1 - math.log(2)) / 2)


def test_drift_of_nothing_is_zero() -> None:
    metrics = drift_metrics(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert set(metrics.values()) == {0.0}
