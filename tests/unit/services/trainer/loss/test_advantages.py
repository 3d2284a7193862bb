"""Advantages against hand-computed values and a slow twin."""

import math
from typing import Any

import numpy as np
import pytest

from services.trainer.loss.advantages import advantages, token_advantages
from shared.job_algorithm import AlgorithmSection

GRPO = AlgorithmSection()
NAMES = ["grpo", "dr_grpo", "reinforce_plus_plus", "rloo"]


def section(baseline: str, normalise: str) -> AlgorithmSection:
    loss = {"policy_loss": "token_ratio"}
    return AlgorithmSection.model_validate({"baseline": baseline, "normalise": normalise, **loss})


@pytest.mark.parametrize(
    ("baseline", "normalise", "expected"),
    [
        # rewards 1 0 | 1 1 0 0, with 1 3 | 2 2 1 1 tokens: the batch's mean over tokens is 0.5
        ("group_mean", "group_std", [1, -1, 1, 1, -1, -1]),
        ("group_mean", "none", [0.5, -0.5, 0.5, 0.5, -0.5, -0.5]),
        ("leave_one_out", "none", [1, -1, 2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ("batch_mean", "none", [0.5, -0.5, 0.5, 0.5, -0.5, -0.5]),
        ("batch_mean", "batch_std", [1, -1, 1, 1, -1, -1]),
        ("none", "none", [1, 0, 1, 1, 0, 0]),
    ],
)
def test_advantages_by_hand(baseline: str, normalise: str, expected: list[float]) -> None:
    found = advantages(
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        ["a", "a", "b", "b", "b", "b"],
        [1, 3, 2, 2, 1, 1],
        algorithm=section(baseline, normalise),
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_statistics_of_the_batch_are_over_tokens() -> None:
    """Rewards 1, 0 with 3 and 1 tokens: mean 0.75, variance 0.1875."""
    found = advantages([1.0, 0.0], ["a", "b"], [3, 1], algorithm=section("batch_mean", "batch_std"))
    np.testing.assert_allclose(found, [0.25 / math.sqrt(0.1875), -0.75 / math.sqrt(0.1875)])


def test_group_mean_may_be_divided_by_the_batchs_spread() -> None:
    """Differences 0.5 and 0.1 keep their proportion, over the spread sqrt((0.25 + 0.01) / 2)."""
    found = advantages(
        [1.0, 0.0, 0.6, 0.4], list("aabb"), [1] * 4, algorithm=section("group_mean", "batch_std")
    )
    np.testing.assert_allclose(found, np.array([0.5, -0.5, 0.1, -0.1]) / math.sqrt(0.13))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2, 0.3], [2.0, 2.0, 2.0], [5.0], []])
def test_equal_rewards_and_a_group_of_one_give_exact_zeros(name: str, rewards: list[float]) -> None:
    found = advantages(
        rewards, ["g"] * len(rewards), [4] * len(rewards), algorithm=AlgorithmSection(name=name)
    )
    assert found.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_with_a_token_gives_zeros(name: str) -> None:
    found = advantages([1.0, 1.0], ["g", "g"], [0, 0], algorithm=AlgorithmSection(name=name))
    assert found.tolist() == [0.0, 0.0]


def slow_advantages(
    rewards: list[float], groups: list[str], tokens: list[int], algorithm: AlgorithmSection
) -> list[float]:
    """Sample by sample, and batch statistics token by token."""

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    everyone = [r for r, count in zip(rewards, tokens, strict=True) for _ in range(count)]
    found = []
    for i, reward in enumerate(rewards):
        mates = [r for r, group in zip(rewards, groups, strict=True) if group == groups[i]]
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        baseline = {
            "group_mean": mean(mates),
            "leave_one_out": mean(others),
            "batch_mean": mean(everyone),
            "none": 0.0,
        }[algorithm.baseline]
        found.append(reward - baseline)
    result = []
    for i, value in enumerate(found):
        if algorithm.normalise == "group_std":
            spread = [v for v, group in zip(found, groups, strict=True) if group == groups[i]]
        elif algorithm.normalise == "batch_std":
            spread = [v for v, count in zip(found, tokens, strict=True) for _ in range(count)]
        else:
            result.append(value)
            continue
        middle = mean(spread)
        result.append(value / math.sqrt(mean([(v - middle) ** 2 for v in spread])))
    return result


@pytest.mark.parametrize("name", NAMES)
def test_advantages_equal_their_slow_twin(name: str) -> None:
    rng = np.random.default_rng(5)
    groups = [f"g{i // 4}" for i in range(20)]
    rewards, tokens = rng.random(20).tolist(), rng.integers(1, 30, 20).tolist()
    algorithm = AlgorithmSection(name=name)
    found = advantages(rewards, groups, tokens, algorithm=algorithm)
    np.testing.assert_allclose(found, slow_advantages(rewards, groups, tokens, algorithm))


def test_costs_of_tokens_come_off_the_reward_of_the_whole_response() -> None:
    """Net rewards 1 - 0.3 and 0 - 0.1, centred: ±0.4, on every token."""
    found = token_advantages(
        [1.0, 0.0],
        ["g", "g"],
        [np.array([0.1, 0.2]), np.array([0.1])],
        algorithm=section("group_mean", "none"),
    )
    np.testing.assert_allclose(found, [0.4, 0.4, -0.4])


def test_returns_to_go_without_a_group() -> None:
    """1 - (0.1 + 0.2), 1 - 0.2, 0 - 0.1 less their mean 1.4 / 3."""
    found = token_advantages(
        [1.0, 0.0],
        ["g", "h"],
        [np.array([0.1, 0.2]), np.array([0.1])],
        algorithm=section("batch_mean", "none"),
    )
    np.testing.assert_allclose(found, np.array([0.7, 0.8, -0.1]) - 1.4 / 3)


@pytest.mark.parametrize("name", NAMES)
def test_without_costs_token_advantages_are_the_samples(name: str) -> None:
    algorithm = AlgorithmSection(name=name)
    rewards, groups, lengths = [1.0, 0.0, 0.5, 0.0], list("aabb"), [2, 1, 3, 2]
    by_sample = advantages(rewards, groups, lengths, algorithm=algorithm)
    costs = [np.zeros(length) for length in lengths]
    by_token = token_advantages(rewards, groups, costs, algorithm=algorithm)
    np.testing.assert_allclose(by_token, np.repeat(by_sample, lengths))


def test_names_fill_in_what_is_not_given() -> None:
    dapo = AlgorithmSection(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    given: dict[str, Any] = {"name": "reinforce_plus_plus", "kl": {"coefficient": 0.1}}
    plus = AlgorithmSection.model_validate(given)
    assert (plus.kl.estimator, plus.kl.place, plus.kl.coefficient) == ("k1", "reward", 0.1)
    again = AlgorithmSection.model_validate(plus.model_dump(mode="json"))
    assert again == plus


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "gspo", "aggregation": "token_mean"}, "a loss per response"),
        ({"baseline": "none"}, "needs baseline 'group_mean'"),
        ({"baseline": "none", "normalise": "batch_std"}, "'batch_std' needs baseline"),
        ({"name": "rloo", "updates_per_batch": 2}, "no longer the policy"),
        ({"name": "rloo", "proximal": "sampler", "correction": {"kind": "none"}}, "does nothing"),
        ({"proximal": "sampler"}, "would do it again"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "pulls nowhere"),
        ({"kl": {"coefficient": 0.1, "estimator": "unbiased", "place": "reward"}}, "of the loss"),
        ({"correction": {"kind": "icepop", "level": "sequence", "low": 0.5}}, "masks tokens"),
        ({"correction": {"kind": "icepop"}}, "low 0 do not fit"),
        ({"correction": {"kind": "none", "veto": 1e-4}}, "veto does nothing"),
        ({"name": "ppo"}, "name"),
        ({"tis": True}, "tis"),
    ],
)
def test_mixes_that_say_nothing_sensible_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AlgorithmSection.model_validate(given)
