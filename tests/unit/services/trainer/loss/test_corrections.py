"""Weights against hand-computed values; ratios are 4, 0.5, 1 of one sample and 0.1 of another."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.loss.corrections import at_bound, sampler_weights
from services.trainer.loss.divergence import kl_estimate, kl_k1, kl_k2, kl_k3
from services.trainer.loss.drift import drift_metrics
from shared.job_algorithm import CorrectionSection

SAMPLE = torch.tensor([0, 0, 0, 1])
CUBE_ROOT = 2 ** (1 / 3)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def weights(used: tuple[int, ...] = (1, 1, 1, 1), **fields: Any) -> list[float]:
    correction = CorrectionSection.model_validate(fields)
    old, sampler = logs(0.8, 0.1, 0.3, 0.05), logs(0.2, 0.2, 0.3, 0.5)
    return sampler_weights(
        old, sampler, SAMPLE, torch.tensor(used, dtype=torch.bool), correction
    ).tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "none"}, [1, 1, 1, 1]),
        ({"kind": "tis"}, [2, 0.5, 1, 0.1]),
        ({"kind": "tis", "low": 0.6, "high": 3.0}, [3, 0.6, 1, 0.6]),
        ({"kind": "tis", "level": "sequence", "high": 1.5}, [1.5, 1.5, 1.5, 0.1]),
        ({"kind": "tis", "level": "geometric"}, [CUBE_ROOT] * 3 + [0.1]),
        ({"kind": "mis"}, [0, 0.5, 1, 0.1]),
        ({"kind": "mis", "low": 0.2}, [0, 0.5, 1, 0]),
        ({"kind": "mis", "level": "sequence", "high": 1.5}, [0, 0, 0, 0.1]),
        ({"kind": "mis", "level": "geometric", "low": 0.2}, [CUBE_ROOT] * 3 + [0]),
        ({"kind": "icepop", "low": 0.5, "high": 5.0}, [4, 0.5, 1, 0]),
        ({"kind": "reject", "low": 0.2}, [0, 1, 1, 0]),
        ({"kind": "tis", "veto": 0.2}, [2, 0.5, 1, 0]),
        ({"kind": "tis", "veto": 0.6}, [0, 0, 0, 0]),
        ({"kind": "tis", "veto": 0.05}, [2, 0.5, 1, 0.1]),
    ],
)
def test_weights_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    assert weights(**fields) == pytest.approx(expected)


def test_unused_tokens_weigh_nothing_and_do_not_count_in_their_sample() -> None:
    found = weights((0, 1, 1, 1), kind="tis", level="geometric")
    assert found == pytest.approx([0, math.sqrt(0.5), math.sqrt(0.5), 0.1])
    assert weights((0, 1, 1, 0), kind="tis", veto=0.2) == pytest.approx([0, 0.5, 1, 0])


def test_weights_have_no_gradient_and_survive_extremes() -> None:
    old = torch.tensor([0.0, -800.0, 0.0], requires_grad=True)
    sampler = torch.tensor([-800.0, 0.0, math.nan])
    used, sample = torch.tensor([True, True, False]), torch.tensor([0, 1, 2])
    for kind in ("tis", "mis", "reject"):
        found = sampler_weights(old, sampler, sample, used, CorrectionSection(kind=kind))
        assert not found.requires_grad
        assert torch.isfinite(found).all()


def test_weights_at_bounds_are_told() -> None:
    tis = CorrectionSection(kind="tis", low=0.6, high=3.0)
    assert at_bound(torch.tensor([3.0, 0.6, 1.0]), tis).tolist() == [True, True, False]
    mis = CorrectionSection(kind="mis")
    assert at_bound(torch.tensor([0.0, 0.6]), mis).tolist() == [True, False]
    assert not at_bound(torch.ones(2), CorrectionSection(kind="none")).any()


def test_estimates_by_hand() -> None:
    policy, reference = logs(0.4), logs(0.2)  # d = -log 2
    assert kl_k1(policy, reference).item() == pytest.approx(math.log(2))
    assert kl_k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))
    for estimator in ("k1", "k2", "k3", "unbiased"):
        assert kl_estimate(policy, policy, estimator).item() == 0.0


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    divergence = (p * (p / q).log()).sum()
    for estimate in (kl_k1, kl_k3):
        torch.testing.assert_close((p * estimate(p.log(), q.log())).sum(), divergence)
    noise = torch.randn(1000, dtype=torch.float64)
    assert (kl_k3(noise, noise.flip(0)) >= 0).all()


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


def test_drift_of_more_tokens_than_torch_has_quantiles_of() -> None:
    many = torch.zeros(2**24 + 1)
    metrics = drift_metrics(many, many, torch.ones(len(many), dtype=torch.bool))
    assert set(metrics.values()) == {0.0}
