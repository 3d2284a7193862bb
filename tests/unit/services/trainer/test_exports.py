import numpy as np

from services.trainer.exports import MAX_PROBE_TOKENS, ProbeTokens, probe_tokens, steadiest
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


def test_a_probe_has_one_sequence_without_what_all_prompts_begin_with() -> None:
    def of(prompt: list[int]) -> TrainingSample:
        changed = {"token_ids": np.array([*prompt, 3, 4], np.int32)}
        return sample("a", 0, [0, 0]).model_copy(
            update=changed | {"num_prompt_tokens": len(prompt)}
        )

    def tokens(*prompts: list[int]) -> list[ProbeTokens]:
        return probe_tokens([of(prompt) for prompt in prompts])

    first, last = [1, 9, 5], [1, 9, 6, 7]
    assert tokens() == []
    assert tokens(last) == [ProbeTokens([*last, 3, 4], 4)]
    assert tokens(first, last) == [ProbeTokens([*first, 3, 4], 3), ProbeTokens([6, 7, 3, 4], 2)]
    assert tokens(last, last)[1] == ProbeTokens([7, 3, 4], 1)  # one token is there to read
    long = [8] * (MAX_PROBE_TOKENS + 5)
    assert [one.num_context for one in tokens(long, [*long, 6])] == [MAX_PROBE_TOKENS, 1]
