"""Advantages against hand-computed values and a slow twin."""

import math
from typing import Any

import numpy as np
import pytest

from services.trainer.loss.advantages import advantages, token_advantages
from shared.job_algorithm import AlgorithmSection, CorrectionSection

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
@pytest.mark.parametrize(
    "rewards",
    [[0.3, 0.1 + 0.2, 0.3], [3e12, 3e12 * (1 + 2**-50), 3e12], [2.0, 2.0, 2.0], [5.0], []],
)
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


def less_costs(
    rewards: list[float], groups: list[str], costs: list[np.ndarray], *, algorithm: AlgorithmSection
) -> np.ndarray:
    """`token_advantages` of tokens that all train."""
    usable = [np.ones(len(one), np.bool_) for one in costs]
    return token_advantages(rewards, groups, costs, usable=usable, algorithm=algorithm)


def test_costs_of_tokens_come_off_the_reward_of_the_whole_response() -> None:
    """Net rewards 1 - 0.3 and 0 - 0.1, centred: ±0.4, on every token."""
    found = less_costs(
        [1.0, 0.0],
        ["g", "g"],
        [np.array([0.1, 0.2]), np.array([0.1])],
        algorithm=section("group_mean", "none"),
    )
    np.testing.assert_allclose(found, [0.4, 0.4, -0.4])


def test_rloo_with_a_kl_by_hand() -> None:
    """Net rewards 0.7, -0.1, -0.2, each less the mean of the two others: 0.85, -0.35, -0.5."""
    found = less_costs(
        [1.0, 0.0, 0.0],
        ["g"] * 3,
        [np.array([0.1, 0.2]), np.array([0.1]), np.array([0.25, -0.05])],
        algorithm=AlgorithmSection(name="rloo"),
    )
    np.testing.assert_allclose(found, [0.85, 0.85, -0.35, -0.5, -0.5])


def test_returns_to_go_without_a_group() -> None:
    """1 - (0.1 + 0.2), 1 - 0.2, 0 - 0.1 less their mean 1.4 / 3."""
    found = less_costs(
        [1.0, 0.0],
        ["g", "h"],
        [np.array([0.1, 0.2]), np.array([0.1])],
        algorithm=section("batch_mean", "none"),
    )
    np.testing.assert_allclose(found, np.array([0.7, 0.8, -0.1]) - 1.4 / 3)


def slow_token_advantages(
    rewards: list[float],
    groups: list[str],
    costs: list[list[float]],
    usable: list[list[bool]],
    algorithm: AlgorithmSection,
) -> list[float]:
    """Token by token: what is left of the reward from it on, then baseline and spread."""
    if algorithm.uses_groups:
        net = [reward - math.fsum(paid) for reward, paid in zip(rewards, costs, strict=True)]
        of_samples = slow_advantages(net, groups, [sum(one) for one in usable], algorithm)
        return [value for i, value in enumerate(of_samples) for _ in costs[i]]
    counts = [one for sample in usable for one in sample]
    returns = []
    for reward, paid in zip(rewards, costs, strict=True):
        returns += [reward - math.fsum(paid[t:]) for t in range(len(paid))]

    def mean(values: list[float]) -> float:
        return math.fsum(v for v, one in zip(values, counts, strict=True) if one) / sum(counts)

    baseline = mean(returns) if algorithm.baseline == "batch_mean" else 0.0
    centred = [value - baseline for value in returns]
    if algorithm.normalise != "batch_std":
        return centred
    middle = mean(centred)
    spread = math.sqrt(mean([(v - middle) ** 2 for v in centred]))
    return [value / spread for value in centred]


@pytest.mark.parametrize(
    ("baseline", "normalise"),
    [
        ("group_mean", "group_std"),
        ("group_mean", "batch_std"),
        ("group_mean", "none"),
        ("leave_one_out", "none"),
        ("batch_mean", "batch_std"),
        ("batch_mean", "none"),
        ("none", "none"),
    ],
)
def test_token_advantages_with_costs_equal_their_slow_twin(baseline: str, normalise: str) -> None:
    """Some samples have no token, and some tokens do not train."""
    rng = np.random.default_rng(8)
    groups, rewards = [f"g{i // 4}" for i in range(12)], rng.random(12).tolist()
    costs = [0.3 * rng.normal(size=int(rng.integers(0, 9))) for _ in rewards]
    usable = [rng.random(len(one)) < 0.8 for one in costs]
    assert not all(map(len, costs))
    algorithm = section(baseline, normalise)
    found = token_advantages(rewards, groups, costs, usable=usable, algorithm=algorithm)
    as_lists = [one.tolist() for one in costs], [one.tolist() for one in usable]
    expected = slow_token_advantages(rewards, groups, *as_lists, algorithm)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_without_costs_token_advantages_are_the_samples(name: str) -> None:
    algorithm = AlgorithmSection(name=name)
    rewards, groups, lengths = [1.0, 0.0, 0.5, 0.0], list("aabb"), [2, 1, 3, 2]
    by_sample = advantages(rewards, groups, lengths, algorithm=algorithm)
    costs = [np.zeros(length) for length in lengths]
    by_token = less_costs(rewards, groups, costs, algorithm=algorithm)
    np.testing.assert_allclose(by_token, np.repeat(by_sample, lengths))


def test_names_fill_in_what_is_not_given() -> None:
    dapo = AlgorithmSection(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    given: dict[str, Any] = {"name": "reinforce_plus_plus", "kl": {"coefficient": 0.1}}
    plus = AlgorithmSection.model_validate(given)
    assert (plus.kl.estimator, plus.kl.place, plus.kl.coefficient) == ("k1", "reward", 0.1)
    again = AlgorithmSection.model_validate(plus.model_dump(mode="json"))
    assert again == plus


def test_rloo_pays_its_kl_out_of_the_reward() -> None:
    """As the paper (arXiv 2402.14740, section 2) and TRL's trainer have it; else where told."""
    given: dict[str, Any] = {"name": "rloo", "kl": {"coefficient": 0.1}}
    rloo = AlgorithmSection.model_validate(given)
    assert (rloo.kl.estimator, rloo.kl.place, rloo.kl_in_reward) == ("k1", "reward", True)
    assert not AlgorithmSection(name="rloo").kl_in_reward
    given["kl"] |= {"estimator": "k3", "place": "loss"}
    assert AlgorithmSection.model_validate(given).kl_in_loss


def test_corrections_have_their_methods_level_and_bounds() -> None:
    """A ratio per response is corrected per response; IcePop's bounds are Ring-1T's."""
    gspo = AlgorithmSection(name="gspo")
    assert (gspo.correction.kind, gspo.correction.level) == ("tis", "sequence")
    per_token: dict[str, Any] = {"name": "gspo", "correction": {"level": "token"}}
    assert AlgorithmSection.model_validate(per_token).correction.level == "token"
    icepop = CorrectionSection.model_validate({"kind": "icepop"})
    assert (icepop.low, icepop.high, icepop.level) == (0.5, 5.0, "token")
    assert CorrectionSection.model_validate({"kind": "icepop", "high": 2.0}).high == 2.0


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
        ({"correction": {"kind": "icepop", "low": 0.0}}, "low 0 do not fit"),
        ({"name": "gspo", "correction": {"kind": "icepop"}}, "level 'sequence'"),
        ({"name": "rloo", "kl": {"coefficient": 0.1, "estimator": "unbiased"}}, "of the loss"),
        ({"correction": {"kind": "none", "veto": 1e-4}}, "veto does nothing"),
        ({"name": "ppo"}, "name"),
        ({"tis": True}, "tis"),
    ],
)
def test_mixes_that_say_nothing_sensible_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AlgorithmSection.model_validate(given)
