"""The whole loss against hand-computed values, a slow twin and finite differences."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.loss.divergence import kl_loss
from services.trainer.loss.objective import TokenBatch, policy_loss
from services.trainer.loss.policy import clipped_surrogate, clipped_weight, per_token_loss
from shared.job_algorithm import AlgorithmSection

NONE = {"correction": {"kind": "none"}}
MIXES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.3},
    "grpo-plain": NONE,
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo", "correction": {"high": 1.5}},
    "gspo": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.2},
    "rloo": {"name": "rloo"},
    "reinforce++": {"name": "reinforce_plus_plus", "correction": {"kind": "mis", "low": 0.7}},
    "sampler": {"proximal": "sampler", **NONE},
    "sequence-tis": {"correction": {"level": "sequence", "high": 1.2}},
    "geometric-mis": {"correction": {"kind": "mis", "level": "geometric", "high": 1.1}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.5, "high": 1.4}},
    "reject-veto": {"correction": {"kind": "reject", "veto": 0.5}},
    "veto-k2": {"correction": {"veto": 0.5}, "kl": {"coefficient": 0.3, "estimator": "k2"}},
    "veto-k3": {"correction": {"veto": 0.5}, "kl": {"coefficient": 0.3}, "entropy_bonus": 0.1},
    "k2": {"kl": {"coefficient": 0.3, "estimator": "k2"}},
    "k3": {"kl": {"coefficient": 0.3}, "entropy_bonus": 0.1},
    "unbiased": {"kl": {"coefficient": 0.3, "estimator": "unbiased"}},
}


def section(**fields: Any) -> AlgorithmSection:
    return AlgorithmSection.model_validate(fields)


def random_batch(*, old: bool, size: int = 40) -> tuple[Tensor, Tensor, TokenBatch]:
    """Samples of 10 tokens; token 2 is unusable, and so is all of the last sample."""
    generator = torch.Generator().manual_seed(3)

    def noise() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    new, sample = -1 - noise().abs(), torch.arange(size) // 10
    coefficients = torch.full((size,), 1 / (size - 11), dtype=torch.float64)
    sampler = new + 0.5 * noise()
    for unusable, value in ((2, math.nan), (slice(size - 10, size), math.inf)):
        coefficients[unusable], sampler[unusable] = 0, value
    advantages = torch.randn(size // 10, generator=generator, dtype=torch.float64)[sample]
    before = new + 0.3 * noise() if old else None
    reference = new + 0.4 * noise()
    batch = TokenBatch(before, sampler, advantages, coefficients, sample, reference)
    return new, noise().abs(), batch


def slow_loss(
    new_T: Tensor, entropy_T: Tensor, batch: TokenBatch, algorithm: AlgorithmSection
) -> float:
    """One token after the other, in plain Python, straight from the formulas."""
    new, entropy = new_T.tolist(), entropy_T.tolist()
    coefficients, sampler = batch.coefficients.tolist(), batch.sampler.tolist()
    old = new if batch.old is None else batch.old.tolist()
    if algorithm.proximal == "sampler":
        old = sampler
    total = 0.0
    for i, coefficient in enumerate(coefficients):
        if coefficient == 0:
            continue
        mates = [
            j for j in range(len(new)) if batch.sample[j] == batch.sample[i] and coefficients[j] > 0
        ]
        advantage = batch.advantages[i].item()
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        ratio = math.exp(new[i] - old[i])
        if algorithm.policy_loss == "sequence_ratio":
            ratio = math.exp(sum(new[j] - old[j] for j in mates) / len(mates))
        bounded = min(max(ratio, low), high)
        loss = {
            "clipped_weight": -bounded * advantage * new[i],
            "reinforce": -advantage * new[i],
        }.get(algorithm.policy_loss, -min(ratio * advantage, bounded * advantage))
        if min(math.exp(old[j] - sampler[j]) for j in mates) < (algorithm.correction.veto or 0):
            continue
        weight = slow_weight(i, mates, old, sampler, algorithm)
        loss *= weight
        if algorithm.kl_in_loss:
            assert batch.reference is not None
            d = batch.reference[i].item() - new[i]
            kl = {"k2": d * d / 2}.get(algorithm.kl.estimator, math.exp(d) - 1 - d)
            if algorithm.kl.estimator == "unbiased":
                kl *= math.exp(new[i] - old[i]) * weight
            loss += algorithm.kl.coefficient * kl
        total += coefficient * (loss - algorithm.entropy_bonus * entropy[i])
    return total


def slow_weight(
    i: int, mates: list[int], old: list[float], sampler: list[float], algorithm: AlgorithmSection
) -> float:
    correction = algorithm.correction
    if correction.kind == "none":
        return 1.0
    ratios = {j: math.exp(old[j] - sampler[j]) for j in mates}
    ratio = {
        "token": ratios[i],
        "sequence": math.prod(ratios.values()),
        "geometric": math.prod(ratios.values()) ** (1 / len(mates)),
    }[correction.level]
    if correction.kind == "tis":
        return min(max(ratio, correction.low), correction.high)
    if not correction.low <= ratio <= correction.high:
        return 0.0
    return 1.0 if correction.kind == "reject" else ratio


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_loss_equals_its_slow_twin(mix: str, old: bool) -> None:
    algorithm = section(**MIXES[mix])
    new, entropy, batch = random_batch(old=old)
    loss = policy_loss(new, entropy, batch, algorithm)
    assert loss.total.item() == pytest.approx(slow_loss(new, entropy, batch, algorithm), rel=1e-10)
    assert not loss.clipped[2]


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_a_vetoed_response_is_not_trained_on_by_any_term(estimator: str) -> None:
    algorithm = section(
        correction={"veto": 1e-4},
        kl={"coefficient": 0.1, "estimator": estimator},
        entropy_bonus=0.1,
    )
    new = torch.tensor([-1.0, -12.0, -2.0], requires_grad=True)
    entropy = torch.ones(3, requires_grad=True)
    batch = TokenBatch(
        None, torch.full((3,), -1.0), torch.ones(3), torch.full((3,), 1 / 3),
        torch.tensor([0, 0, 1]), torch.tensor([-1.5, -2.0, -1.5]),
    )  # fmt: skip
    policy_loss(new, entropy, batch, algorithm).total.backward()
    assert new.grad is not None
    assert entropy.grad is not None
    assert new.grad[:2].tolist() == entropy.grad[:2].tolist() == [0.0, 0.0]
    assert new.grad[2] != 0 != entropy.grad[2]


@pytest.mark.parametrize("mix", MIXES)
def test_gradient_by_finite_differences(mix: str) -> None:
    algorithm = section(**MIXES[mix])
    new, entropy, batch = random_batch(old=True)
    if mix == "cispo":  # its weight is held still: differentiate the rest
        assert batch.old is not None
        ratio = (new - batch.old).exp().clamp(0.8, 1.2)
        still = policy_loss(new, entropy, batch, algorithm).weights * ratio
        loss = (-still * batch.advantages * new * batch.coefficients).nansum()
        assert policy_loss(new, entropy, batch, algorithm).total.item() == pytest.approx(
            loss.item()
        )
        new.requires_grad_()
        policy_loss(new, entropy, batch, algorithm).total.backward()
        torch.testing.assert_close(new.grad, -still * batch.advantages * batch.coefficients)
        return

    def total(new: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(new, entropy, batch, algorithm).total

    new.requires_grad_()
    entropy.requires_grad_()
    assert torch.autograd.gradcheck(total, (new, entropy))
    total(new, entropy).backward()
    assert new.grad is not None
    assert new.grad[2] == 0
    assert not new.grad[-10:].any()


@pytest.mark.parametrize("mix", MIXES)
def test_losses_of_pieces_add_up_to_the_whole(mix: str) -> None:
    """Samples may be spread over micro-batches in any way."""
    algorithm = section(**MIXES[mix])
    new, entropy, batch = random_batch(old=True)
    whole = policy_loss(new, entropy, batch, algorithm).total
    pieces = torch.zeros((), dtype=torch.float64)
    for part in (torch.arange(10, 20), torch.cat([torch.arange(10), torch.arange(20, 40)])):
        piece = policy_loss(new[part], entropy[part], batch.at(part, "cpu"), algorithm)
        pieces += piece.total
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("mix", MIXES)
def test_a_micro_batch_without_usable_tokens_gives_zero_and_no_nan(mix: str) -> None:
    new, entropy, batch = random_batch(old=False)
    masked = replace(
        batch,
        coefficients=torch.zeros_like(new),
        sampler=torch.full_like(new, math.nan),
    )
    new.requires_grad_()
    loss = policy_loss(new, entropy, masked, section(**MIXES[mix]))
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert new.grad is not None
    assert not new.grad.any()


@pytest.mark.parametrize("mix", ["grpo", "gspo", "cispo", "rloo", "reinforce++"])
def test_zero_advantages_give_zero_gradient(mix: str) -> None:
    new, entropy, batch = random_batch(old=False)
    new.requires_grad_()
    still = replace(batch, advantages=torch.zeros_like(new))
    policy_loss(new, entropy, still, section(**MIXES[mix])).total.backward()
    assert new.grad is not None
    assert not new.grad.any()


@pytest.mark.parametrize("recorded", [-800.0, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mix", MIXES)
def test_extreme_log_probabilities_give_numbers(
    mix: str, dtype: torch.dtype, recorded: float
) -> None:
    """Ratios of e^±800 between any two of actor, its old self, sampler and reference; and whatever
    FP32 can write in a sampler's message."""
    extremes = torch.tensor([0.0, -800.0], dtype=dtype)
    new, old, sampler, reference = (
        one.flatten() for one in torch.meshgrid([extremes] * 4, indexing="ij")
    )
    sampler = sampler.where(sampler == 0, recorded)
    for sign in (1.0, -1.0):
        places = torch.arange(len(new))
        ones = torch.ones_like(new)
        batch = TokenBatch(old, sampler, sign * ones, ones / len(new), places // 2, reference)
        moved = new.clone().requires_grad_()
        loss = policy_loss(moved, ones, batch, section(**MIXES[mix]))
        loss.total.backward()
        assert torch.isfinite(loss.total)
        assert torch.isfinite(loss.weights).all()
        assert moved.grad is not None
        assert torch.isfinite(moved.grad).all()


@pytest.mark.parametrize("log_ratio", [-15.0, -4.0, 4.0, 15.0])
@pytest.mark.parametrize("mix", ["grpo-plain", "gspo", "k3", "unbiased"])
def test_value_and_gradient_are_exact_inside_the_clamp(mix: str, log_ratio: float) -> None:
    """One token far from its old self and from the reference, and no clipping in the way."""
    algorithm = section(**{**MIXES[mix], "clip_low": 1.0, "clip_high": 1e9})
    old, one = torch.tensor([-20.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(old, old, -one, one, torch.zeros(1, dtype=torch.int64), old - 1)

    def total(new: float) -> float:
        return slow_loss(torch.tensor([new], dtype=torch.float64), 0 * one, batch, algorithm)

    new = (old + log_ratio).requires_grad_()
    loss = policy_loss(new, 0 * one, batch, algorithm).total
    assert loss.item() == pytest.approx(total(new.item()), rel=1e-10)
    loss.backward()
    slope = (total(new.item() + 1e-6) - total(new.item() - 1e-6)) / 2e-6
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_policy_far_from_its_reference_is_still_pulled_back() -> None:
    """Beyond the bound k3 goes on as its tangent: upwards to a reference that is far above."""
    new = torch.tensor([-800.0, -30.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -800.0])
    kl_loss(new, new.detach(), reference, torch.ones(3), "k3").sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([1 - math.exp(20), 1 - math.exp(20), 1.0])


def test_no_tokens_at_all() -> None:
    empty = torch.zeros(0)
    batch = TokenBatch(None, empty, empty, empty, torch.zeros(0, dtype=torch.int64))
    for mix in ("grpo", "gspo", "sequence-tis", "reject-veto"):
        assert policy_loss(empty, empty, batch, section(**MIXES[mix])).total.item() == 0.0


# By hand


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_surrogate_by_hand() -> None:
    """Ratios 2, 2, 0.5, 0.5 within [0.8, 1.3]."""
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    per_token, clipped = clipped_surrogate(logs(2, 2, 0.5, 0.5), advantages, 0.8, 1.3)
    torch.testing.assert_close(per_token, torch.tensor([-1.3, 2.0, -0.5, 0.8], dtype=torch.float64))
    assert clipped.tolist() == [True, False, False, True]


def test_clipped_tokens_have_no_gradient() -> None:
    log_ratio = logs(2.0, 0.5).requires_grad_()
    per_token, _ = clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0]), 0.8, 1.3)
    per_token.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0.0, 0.0]


def test_sequence_ratio_by_hand() -> None:
    """Ratios 4 and 1 of one response: its ratio is 2, bounded to 1.1; the other's is 1."""
    new, old = logs(0.4, 0.3, 0.2), logs(0.1, 0.3, 0.2)
    algorithm = section(name="gspo", clip_low=0.1, clip_high=0.1)
    sample, used = torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    for advantage, expected in ((1.0, [-1.1, -1.1, -1.0]), (-1.0, [2.0, 2.0, 1.0])):
        advantages = torch.full((3,), advantage, dtype=torch.float64)
        per_token, _ = per_token_loss(new, old, advantages, sample, used, algorithm)
        assert per_token.tolist() == pytest.approx(expected)


def test_clipped_weight_by_hand() -> None:
    """Ratio 4 is bounded to 1.5, and the token still has a gradient: -1.5 · A."""
    new = logs(0.4).requires_grad_()
    per_token, clipped = clipped_weight(new, logs(0.1), torch.tensor([2.0]), 0.5, 1.5)
    assert per_token.item() == pytest.approx(-1.5 * 2 * math.log(0.4))
    assert clipped.tolist() == [True]
    per_token.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-3.0)


def test_reinforce_by_hand() -> None:
    """-A · log p, whatever the ratio: 2 · log 4 and -3 · log 5."""
    new, old = logs(0.25, 0.2), logs(0.5, 0.5)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    sample, used = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    per_token, clipped = per_token_loss(new, old, advantages, sample, used, section(name="rloo"))
    assert per_token.tolist() == pytest.approx([2 * math.log(4), -3 * math.log(5)])
    assert not clipped.any()


def test_unbiased_divergence_by_hand() -> None:
    """Ratio 0.4 / 0.2, weight 1.5, k3 of d = log(0.2 / 0.4): 3 · (0.5 - 1 + log 2)."""
    weight = torch.tensor([1.5], dtype=torch.float64)
    found = kl_loss(logs(0.4), logs(0.2), logs(0.2), weight, "unbiased")
    assert found.item() == pytest.approx(3 * (math.log(2) - 0.5))


def test_first_update_is_the_policy_gradient() -> None:
    """With old = new the ratio is 1 and the gradient of a token is -A · w · coefficient."""
    new, entropy, batch = random_batch(old=False)
    new.requires_grad_()
    loss = policy_loss(new, entropy, batch, section())
    loss.total.backward()
    expected = -batch.advantages * loss.weights * batch.coefficients
    assert new.grad is not None
    torch.testing.assert_close(new.grad, expected)


def test_unbiased_divergence_of_tokens_that_another_policy_drew() -> None:
    """Over all outcomes of a small softmax, weighed by the sampler's probabilities: value and
    gradient of the divergence from the new policy, if the ratio goes on to the sampler."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference, old, sampler = torch.tensor(
        [[0.1, 0.4, -0.5], [0.5, -0.3, 0.4], [-0.2, 0.3, 0.6]], dtype=torch.float64
    ).log_softmax(-1)
    new = logits.log_softmax(-1)
    divergence = (new.exp() * (new - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for correction, is_exact in (({"kind": "tis", "high": 9.0}, True), ({"kind": "none"}, False)):
        algorithm = section(kl={"coefficient": 1.0, "estimator": "unbiased"}, correction=correction)
        batch = TokenBatch(old, sampler, torch.zeros(3), sampler.exp(), torch.arange(3), reference)
        loss = policy_loss(new, torch.zeros(3), batch, algorithm).total
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(loss, divergence, rtol=1e-9) is is_exact
        assert torch.allclose(found, expected, rtol=1e-9) is is_exact


@pytest.mark.parametrize("estimator", ["k2", "unbiased"])
def test_kl_loss_has_the_gradient_of_the_divergence(estimator: str) -> None:
    """Over all outcomes of a small softmax, weighed by their probabilities."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    drawn = logprobs.detach()
    terms = kl_loss(logprobs, drawn, reference, torch.ones(3), estimator)
    (found,) = torch.autograd.grad((drawn.exp() * terms).sum(), logits, retain_graph=True)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, expected)


def test_k1_in_the_loss_would_pull_nowhere() -> None:
    """Why that mix is refused: its expected gradient is zero, whatever the reference."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    terms = kl_loss(logprobs, logprobs.detach(), reference, torch.ones(3), "k1")
    (found,) = torch.autograd.grad((logprobs.detach().exp() * terms).sum(), logits)
    torch.testing.assert_close(found, torch.zeros(3, dtype=torch.float64))
