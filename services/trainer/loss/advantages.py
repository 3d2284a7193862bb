"""From rewards to advantages, in float64; no torch, because the conductor computes them.

A reward, less a baseline, divided by a spread. Values that differ by float noise only are equal:
their advantages are exact zeros.
"""

# n samples of the batch, R response tokens of all of them, samples in order
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.job_algorithm import AlgorithmSection, Baseline

# Rewards closer than this, of the largest or of 1, are equal up to float noise.
MIN_REWARD_SPREAD = 1e-6
Array = npt.NDArray[np.float64]
Groups = Sequence[npt.NDArray[np.int64]]


def advantages(
    rewards: Sequence[float],
    groups: Sequence[str],
    num_tokens: Sequence[int],
    *,
    algorithm: AlgorithmSection,
) -> Array:
    """One advantage for each sample `[n]`; `groups[i]` is the group of sample i.

    Baselines: the group's mean (GRPO, arXiv 2402.03300, section 4.1.2), the mean of the group's
    others (RLOO, 2402.14740), the batch's mean (REINFORCE++, 2501.03262), none. Spreads: the
    group's population standard deviation (GRPO), the batch's, none (Dr.GRPO, 2503.20783).
    Statistics of the batch are over the tokens that train, of which sample i has `num_tokens[i]`;
    those of groups are over all their samples, whether they have one or not.
    """
    values = np.asarray(rewards, np.float64)
    places = _places(groups)
    weights = np.asarray(num_tokens, np.float64)
    values = _less_baseline(values, places, weights, algorithm.baseline)
    if algorithm.normalise == "group_std":
        for place in places:
            values[place] = _divided(values[place], np.ones(len(place)))
    elif algorithm.normalise == "batch_std":
        values = _divided(values, weights)
    return values


def are_equal(rewards: npt.ArrayLike) -> bool:
    """Whether nothing but float noise, or nothing at all, is between them."""
    values = np.asarray(rewards, np.float64)
    if not len(values):
        return True
    largest = max(1.0, float(np.abs(values).max()))
    return bool(np.ptp(values) <= MIN_REWARD_SPREAD * largest)


def token_advantages(
    rewards: Sequence[float],
    groups: Sequence[str],
    token_costs: Sequence[Array],
    *,
    usable: Sequence[npt.NDArray[np.bool_]],
    algorithm: AlgorithmSection,
) -> Array:
    """Advantages of all tokens `[R]` when each token has a cost `token_costs[i]` (β · KL) as well.

    With a baseline of groups a sample's reward is less the sum of its costs (as a sequence-level
    reward, arXiv 2402.14740); otherwise a token's return is the reward less the costs from it on
    (REINFORCE++, 2501.03262, eq. 4 and 5). Statistics of the batch are over `usable` tokens; a
    sample without tokens has no cost and counts in its group. So these are the advantages of
    `advantages` where all costs are 0.
    """
    if algorithm.uses_groups:
        net = [r - float(costs.sum()) for r, costs in zip(rewards, token_costs, strict=True)]
        counts = [int(one.sum()) for one in usable]
        found = advantages(net, groups, counts, algorithm=algorithm)
        return np.repeat(found, [len(costs) for costs in token_costs])
    returns = [
        reward - np.cumsum(costs[::-1])[::-1]
        for reward, costs in zip(rewards, token_costs, strict=True)
    ]
    values = np.concatenate(returns) if returns else np.zeros(0)
    weights = np.concatenate([*usable, np.zeros(0)])
    values = _less_baseline(values, [], weights, algorithm.baseline)
    return _divided(values, weights) if algorithm.normalise == "batch_std" else values


def _places(groups: Sequence[str]) -> Groups:
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return [np.asarray(indices) for indices in found.values()]


def _less_baseline(values: Array, places: Groups, weights: Array, baseline: Baseline) -> Array:
    if baseline == "none":
        return values.copy()
    if baseline == "batch_mean":
        return _centred(values, weights)
    result = np.zeros_like(values)
    for place in places:
        others = len(place) - 1
        scale = 1.0
        if baseline == "leave_one_out":  # r - mean of others = (r - mean) · n / (n - 1)
            scale = len(place) / others if others else 0.0
        result[place] = _centred(values[place], np.ones(len(place))) * scale
    return result


def _centred(values: Array, weights: Array) -> Array:
    if _are_equal(values, weights):
        return np.zeros_like(values)
    return values - np.average(values, weights=weights)


def _divided(values: Array, weights: Array) -> Array:
    if _are_equal(values, weights):
        return np.zeros_like(values)
    mean = np.average(values, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    return np.asarray(values / spread, np.float64)


def _are_equal(values: Array, weights: Array) -> bool:
    """Of those that count."""
    return are_equal(values[weights > 0])
