import numpy as np

from services.trainer.exports import steadiest
from shared.messages import TrainingBatch, TrainingSample


def sample(group: str, index: int, logprobs: list[float]) -> TrainingSample:
    return TrainingSample(
        rollout_id=f"{group}.{index}",
        group_id=group,
        token_ids=[1, 2, *[3] * len(logprobs)],
        num_prompt_tokens=2,
        sampler_logprobs=logprobs,
        advantage=0.0,
        reward=0.0,
        oldest_version=0,
    )


def test_probe_avoids_surprising_tokens_short_responses_and_broken_numbers() -> None:
    samples = [
        sample("a", 0, [-0.1, -7.0, -0.1]),
        sample("a", 1, [-0.5, -0.5, -0.5]),
        sample("b", 0, [-0.1]),
        sample("b", 1, [-0.2, -2.0, -0.1]),
        sample("c", 0, [-0.1, np.nan, -0.1]),
        sample("d", 0, [-0.1, -0.1, -0.1]),
        sample("d", 1, [-0.2, -0.2, -0.2]),
    ]
    batch = TrainingBatch(
        job_id="j",
        step=1,
        policy_version=0,
        temperature=1.0,
        samples=samples,
        group_ids=["a", "b", "c", "d"],
    )
    assert [one.rollout_id for one in steadiest(batch, 9)] == ["d.0", "a.1", "b.1"]
    assert [one.rollout_id for one in steadiest(batch, 2)] == ["d.0", "a.1"]
