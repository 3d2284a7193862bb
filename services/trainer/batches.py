"""From graded groups to what one optimiser step trains on: rewards, advantages, samples in order.

Groups stand in draw order whatever order they arrived in, so that a batch, and with it the step,
is a function of its groups.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.loss.advantages import MIN_REWARD_SPREAD, advantages, are_equal
from services.trainer.loss.validity import are_logprobs
from shared.job import Job
from shared.job_reward import UnscoredSection
from shared.messages import (
    Outcome,
    Rollout,
    Score,
    ScoredGroup,
    TrainingBatch,
    TrainingSample,
    UntrainedReward,
)

RIGHT = 1.0


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A collected group; `rewards[i]` and `routes[i]` (where kept) belong to rollout i."""

    entry_id: bytes
    scored: ScoredGroup
    rewards: tuple[float, ...]
    routes: tuple[bytes, ...] | None = None

    @property
    def group_id(self) -> str:
        return self.scored.group.prompt.group_id

    @property
    def draw(self) -> int:
        return self.scored.group.prompt.draw

    @property
    def oldest_version(self) -> int | None:
        return oldest_version(self.scored)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a group cannot be trained, and what its graded samples earned."""

    reason: str
    rewards: tuple[float, ...]


def judge(scored: ScoredGroup, *, job: Job, oldest_trainable: int) -> tuple[float, ...] | Unusable:
    """The rewards of a group's samples, or why it is not trained on."""
    graded = graded_rewards(scored, job=job)
    oldest = oldest_version(scored)
    if any(rollout.finish_reason == "abort" for rollout in scored.group.rollouts):
        return Unusable("aborted", graded)
    if oldest is None:
        return Unusable("empty_responses", graded)
    if oldest < oldest_trainable:
        return Unusable("too_old", graded)
    if _bad_logprob_share(scored.group.rollouts) > job.algorithm.max_bad_logprob_share:
        return Unusable("bad_logprobs", graded)
    if len(graded) < len(scored.outcomes):
        return Unusable(_unscored_reason(scored.outcomes, job.reward.unscored), graded)
    rollouts = scored.group.rollouts
    if not any(_is_trained(rollout, job) for rollout in rollouts):  # the rest of them is empty
        return Unusable("all_truncated", graded)
    if job.sampling.dynamic and (reason := _reason_to_redraw(scored, graded, job)):
        return Unusable(reason, graded)
    return graded


def graded_rewards(scored: ScoredGroup, *, job: Job) -> tuple[float, ...]:
    """What those samples earned that have a score."""
    return tuple(score.value for score in _scores(scored, job))


def oldest_version(scored: ScoredGroup) -> int | None:
    """The oldest policy version in any response; None when all are empty."""
    versions = [rollout.oldest_version for rollout in scored.group.rollouts]
    return min((version for version in versions if version is not None), default=None)


def build_batch(
    kept: Sequence[KeptGroup], *, job: Job, job_id: str, step: int, policy_version: int
) -> TrainingBatch:
    """The batch of step `step`, which trains `policy_version`.

    Empty responses, and truncated ones if the job says so, are left out; they count in baselines of
    groups. What is of the batch is over its usable tokens.
    """
    ordered = sorted(kept, key=lambda group: group.draw)
    found = advantages(
        [reward for group in ordered for reward in group.rewards],
        [group.group_id for group in ordered for _ in group.rewards],
        [_num_trained(one, job) for group in ordered for one in group.scored.group.rollouts],
        algorithm=job.algorithm,
    )
    ends = np.cumsum([len(group.rewards) for group in ordered])[:-1]
    parts = list(zip(ordered, np.split(found, ends), strict=True))
    return TrainingBatch(
        job_id=job_id,
        step=step,
        policy_version=policy_version,
        temperature=job.sampling.temperature,
        samples=[sample for part in parts for sample in _samples(*part, job)],
        group_ids=[group.group_id for group in ordered],
        untrained=[
            UntrainedReward(group_id=group.group_id, reward=reward)
            for group in ordered
            for rollout, reward in zip(group.scored.group.rollouts, group.rewards, strict=True)
            if not _is_trained(rollout, job)
        ],
    )


def batch_facts(
    batch: TrainingBatch, kept: Sequence[KeptGroup], *, reward_sum: float, num_rewards: int
) -> dict[str, Any]:
    """What is known of a step before it is taken, by the names of the `step` event.

    `reward_sum` over `num_rewards` graded samples are those of the groups dropped meanwhile.
    """
    rewards = [reward for group in kept for reward in group.rewards]
    rollouts = [rollout for group in kept for rollout in group.scored.group.rollouts]
    lengths = [len(rollout.response_token_ids) for rollout in rollouts]
    lags, weights = _lags(rollouts, batch.policy_version)
    num_graded = len(rewards) + num_rewards
    return {
        "groups": len(batch.group_ids),
        "samples": len(batch.samples),
        "tokens": sum(len(sample.token_ids) for sample in batch.samples),
        "response_tokens": sum(lengths),
        "empty_responses": lengths.count(0),
        "graded_samples": num_graded,
        "reward_raw": (math.fsum(rewards) + reward_sum) / num_graded if num_graded else None,
        "reward_trained": math.fsum(rewards) / len(rewards),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "truncated_share": _share(rollouts, "length"),
        "lag_mean": float(np.average(lags, weights=weights)) if weights else 0.0,
        "lag_max": max(lags, default=0),
        "lag_tokens": _tokens_by_lag(lags, weights),
        "route_bytes": sum(len(sample.routes or b"") for sample in batch.samples),
    }


def _bad_logprob_share(rollouts: Sequence[Rollout]) -> float:
    """Of the group's response tokens."""
    logprobs = np.concatenate([rollout.logprobs for rollout in rollouts])
    return 1.0 - float(are_logprobs(logprobs).mean()) if len(logprobs) else 0.0


def dropped_facts(scored: ScoredGroup, verdict: Unusable) -> dict[str, Any]:
    """By the names of the `group_dropped` event."""
    rewards = verdict.rewards
    return {
        "group_id": scored.group.prompt.group_id,
        "reason": verdict.reason,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "outcomes": outcome_counts(scored.outcomes),
    }


def outcome_counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(Counter(outcome.kind for outcome in outcomes))


def _samples(group: KeptGroup, found: npt.NDArray[np.float64], job: Job) -> list[TrainingSample]:
    prompt = group.scored.group.prompt
    rollouts = group.scored.group.rollouts
    return [
        TrainingSample(
            rollout_id=rollout.rollout_id,
            group_id=group.group_id,
            token_ids=np.concatenate([prompt.prompt_token_ids, rollout.response_token_ids]),
            num_prompt_tokens=len(prompt.prompt_token_ids),
            sampler_logprobs=rollout.logprobs,
            advantage=float(advantage),
            reward=reward,
            oldest_version=rollout.oldest_version,
            version_spans=rollout.version_spans,
            routes=routes,
        )
        for rollout, reward, advantage, routes in zip(
            rollouts, group.rewards, found, group.routes or [None] * len(rollouts), strict=True
        )
        if _is_trained(rollout, job)
    ]


def _is_trained(rollout: Rollout, job: Job) -> bool:
    """Whether it has tokens that the job trains on."""
    left_out = job.algorithm.truncated == "leave_out" and rollout.finish_reason == "length"
    return rollout.oldest_version is not None and not left_out


def _num_trained(rollout: Rollout, job: Job) -> int:
    """Of its tokens, those that train."""
    return int(are_logprobs(rollout.logprobs).sum()) if _is_trained(rollout, job) else 0


def _lags(rollouts: Sequence[Rollout], policy_version: int) -> tuple[list[int], list[int]]:
    """Versions that each span is behind the trained one, and its number of tokens."""
    spans = [span for rollout in rollouts for span in rollout.version_spans]
    return (
        [policy_version - span.policy_version for span in spans],
        [span.num_tokens for span in spans],
    )


def _tokens_by_lag(lags: Sequence[int], weights: Sequence[int]) -> dict[str, int]:
    """Response tokens by how many versions behind they were sampled."""
    found: Counter[int] = Counter()
    for lag, weight in zip(lags, weights, strict=True):
        found[lag] += weight
    return {str(lag): found[lag] for lag in sorted(found)}


def _share(rollouts: Sequence[Rollout], finish_reason: str) -> float:
    return sum(rollout.finish_reason == finish_reason for rollout in rollouts) / len(rollouts)


def _scores(scored: ScoredGroup, job: Job) -> list[Score]:
    """Of the samples that have one."""
    found = [_score(outcome, job.reward.unscored) for outcome in scored.outcomes]
    return [score for score in found if score is not None]


def _score(outcome: Outcome, unscored: UnscoredSection) -> Score | None:
    if isinstance(outcome, Score):
        return outcome
    return Score(value=0.0) if getattr(unscored, outcome.kind) == "zero" else None


def _unscored_reason(outcomes: Sequence[Outcome], unscored: UnscoredSection) -> str:
    """The gravest of those that drop the group names it."""
    kinds = {outcome.kind for outcome in outcomes if _score(outcome, unscored) is None}
    return next(f"unscored_{kind}" for kind in ("error", "timeout", "unparseable") if kind in kinds)


def _reason_to_redraw(scored: ScoredGroup, graded: Sequence[float], job: Job) -> str | None:
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11) keeps groups of right and wrong answers.

    What parts and the penalty for length add is no such difference; and where it makes the rewards
    of different answers equal, there is nothing to learn either.
    """
    correctness = [score.correctness for score in _scores(scored, job)]
    if not (are_equal(correctness) or are_equal(graded)):
        return None
    if all(rollout.finish_reason == "length" for rollout in scored.group.rollouts):
        return "all_truncated"
    return _no_variance_reason(correctness)


def _no_variance_reason(correctness: Sequence[float]) -> str:
    if min(correctness) >= RIGHT - MIN_REWARD_SPREAD:
        return "no_variance_all_right"
    if max(correctness) <= MIN_REWARD_SPREAD:
        return "no_variance_all_wrong"
    return "no_variance_same"
