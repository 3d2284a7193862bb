"""What a rollout server sampled, as whoever compares its log-probabilities reads it."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Sample(BaseModel):
    """Example: {"token_ids": [7, 9], "logprobs": [-0.5, null]}; null is what is not finite."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    token_ids: list[int]
    logprobs: list[float | None]


def check_counts(
    results: Sequence[Sequence[Sample]], *, num_prompts: int, num_samples: int
) -> None:
    """ValueError unless each prompt has its samples, and each token its log-probability."""
    if len(results) != num_prompts:
        raise ValueError(f"{len(results)} results of {num_prompts} prompts")
    for prompt, samples in enumerate(results):
        if len(samples) != num_samples:
            raise ValueError(f"prompt {prompt} has {len(samples)} samples, not {num_samples}")
        for one in samples:
            if len(one.logprobs) != len(one.token_ids):
                found = f"{len(one.logprobs)} log-probabilities of {len(one.token_ids)} tokens"
                raise ValueError(f"prompt {prompt} has {found}")
