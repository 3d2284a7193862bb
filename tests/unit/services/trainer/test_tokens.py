"""Advantages that the actor takes anew, less a KL: the same rules as without one."""

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.batches import KeptGroup, build_batch
from services.trainer.engine.tokens import less_kl, response_tokens
from shared.job import Job
from shared.job_actor import ReplaySection
from shared.messages import (
    PromptGroup,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    TrainingBatch,
    VersionSpan,
)
from tests.tiny_deepseek_v4 import FLASH


def make_job(**algorithm: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 8},
            "algorithm": {"truncated": "leave_out"} | algorithm,
        }
    )


def rollout(name: str, length: int, *, is_cut: bool = False, bad: int = 0) -> Rollout:
    """With so many tokens, of which the first `bad` have no log-probability."""
    return Rollout(
        rollout_id=name,
        response_token_ids=[7] * length,
        logprobs=[float("nan")] * bad + [-0.5] * (length - bad),
        version_spans=[VersionSpan(policy_version=0, num_tokens=length)] if length else [],
        finish_reason="length" if is_cut else "stop",
        text="",
    )


def kept(draw: int, rollouts: list[Rollout], rewards: tuple[float, ...]) -> KeptGroup:
    prompt = PromptGroup(
        job_id="j",
        group_id=f"j.g{draw}",
        draw=draw,
        prompt_token_ids=[1, 2, 3],
        gold="1",
        grader="math",
        num_samples=len(rollouts),
        sampling=SamplingParams(max_response_tokens=8),
        seed=1,
        min_policy_version=0,
    )
    group = RolloutGroup(
        prompt=prompt, replica="r", rollouts=rollouts, sampled_at_s=0.0, sampling_s=0.0
    )
    outcomes = [Score(value=reward) for reward in rewards]
    return KeptGroup(b"1-0", ScoredGroup(group=group, outcomes=outcomes, grading_s=0.0), rewards)


def built(job: Job) -> TrainingBatch:
    """Two groups that have an empty response, a truncated one, and tokens that do not train."""
    groups = [
        kept(0, [rollout("a", 3), rollout("b", 2), rollout("c", 0)], (1.0, 0.0, 0.0)),
        kept(1, [rollout("d", 6, bad=2), rollout("e", 4), rollout("f", 8, is_cut=True)],
             (1.0, 0.25, 0.0)),
    ]  # fmt: skip
    return build_batch(groups, job=job, job_id="j", step=1, policy_version=0)


@pytest.mark.parametrize("coefficient", [0.0, 1e-9])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_a_kl_in_the_reward_begins_where_there_is_none(name: str, coefficient: float) -> None:
    """As its coefficient goes to 0, the advantages become those of the batch as it came."""
    job = make_job(name=name, kl={"coefficient": 1.0, "estimator": "k1", "place": "reward"})
    batch = TrainingBatch.unpack(built(job).pack())
    tokens = response_tokens(batch, architecture=FLASH, max_bad_share=1.0, replay=ReplaySection())
    kl = job.algorithm.kl.model_copy(update={"coefficient": coefficient})
    algorithm = job.algorithm.model_copy(update={"kl": kl})
    costs = torch.from_numpy(np.random.default_rng(2).normal(size=len(tokens.sampler)))
    found = less_kl(tokens, costs, batch=batch, algorithm=algorithm)
    torch.testing.assert_close(found.advantages, tokens.advantages, rtol=1e-6, atol=1e-6)


def test_a_response_without_a_token_to_train_counts_in_its_group_at_no_cost() -> None:
    """RLOO on rewards 1, 0 and an empty 0: each less the mean of the two others. The costs of b,
    0.25 on each of two tokens, are counted in the baselines of a."""
    job = make_job(name="rloo", kl={"coefficient": 0.5})
    batch = built(job)
    assert [one.reward for one in batch.untrained] == [0.0, 0.0]
    tokens = response_tokens(batch, architecture=FLASH, max_bad_share=1.0, replay=ReplaySection())
    assert tokens.advantages[:5].tolist() == [1.0] * 3 + [-0.5] * 2
    costs = torch.zeros(len(tokens.sampler))
    costs[3:5] = 0.5
    found = less_kl(tokens, costs, batch=batch, algorithm=job.algorithm)
    assert found.advantages[:5].tolist() == [1.25] * 3 + [-1.0] * 2


def test_a_batch_of_before_has_baselines_of_what_it_holds() -> None:
    """Of a redo log that does not know what was left out: as that step was taken."""
    job = make_job(name="rloo", kl={"coefficient": 0.5})
    batch = built(job).model_copy(update={"untrained": []})
    tokens = response_tokens(batch, architecture=FLASH, max_bad_share=1.0, replay=ReplaySection())
    found = less_kl(tokens, torch.zeros(len(tokens.sampler)), batch=batch, algorithm=job.algorithm)
    assert found.advantages[:5].tolist() == [1.0] * 3 + [-1.0] * 2
