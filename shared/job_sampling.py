"""The job's `sampling` section: what is asked of the policy, and the bounds of a step's groups."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.section import Section


class SamplingSection(Section):
    """How many samples a step has, and how they are drawn."""

    groups_per_step: int = Field(16, gt=0)
    """Prompts of one step; each becomes a group."""
    samples_per_prompt: int = Field(8, gt=0)
    """1 only for a baseline that needs no group, and without dynamic sampling."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; the trainer scores at the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1, as with `top_k`, training is biased: see the job's warnings."""
    top_k: int = Field(0, ge=0, lt=2**31)
    """0 keeps every token."""
    context_length: int = Field(gt=0)
    """Prompt and response together; longer prompts are skipped and counted."""
    max_response_tokens: int = Field(gt=0)
    """Longest completion; a longer one is cut off, and counts as truncated."""
    oversampling: float = Field(1.0, ge=1.0, le=8.0)
    """Groups in flight per step beyond those needed; the surplus is dropped and counted."""
    dynamic: bool = True
    """Drop groups whose answers are worth the same, whatever parts and the penalty for length add,
    and draw others instead."""
    max_redraws: float = Field(8.0, ge=1.0)
    """Groups that may arrive for a step, as a multiple of groups_per_step."""
    max_wait_s: float | None = Field(None, gt=0)
    """Seconds that a step may be collected for."""
    min_usable_share: float = Field(0.0, ge=0, le=1)
    """Of a step's arrived groups (groups_per_step at least), those that must be trainable."""
    when_short: Literal["smaller", "stop"] = "smaller"
    """What happens when one of the three bounds is hit before a step has its groups: it is taken
    with those that are there, or the job pauses with the reasons."""
    interrupted: Literal["resume", "discard"] = "resume"
    """A completion that an update cut short (`update.pause_mode = "abort"`) goes on under the new
    version, or begins again."""
    extra_samples: int = Field(0, ge=0, le=64)
    """Samples begun beyond samples_per_prompt; a group ends with its first samples_per_prompt
    complete ones. Saves waiting for the longest, and favours short responses."""

    @model_validator(mode="after")
    def _draws(self) -> Self:
        if self.top_k == 1:
            raise ValueError("top_k 1 draws nothing: all samples of a prompt would be equal")
        return self


def truncation_warning(top_p: float, top_k: int) -> str | None:
    """What a distribution without its tail means for training; None if it is whole."""
    cuts = [f"top_p {top_p:g}"] * (top_p < 1) + [f"top_k {top_k}"] * (top_k > 0)
    if not cuts:
        return None
    return (
        f"sampling.{' and '.join(cuts)}: completions are drawn from a truncated distribution, but "
        "recorded log-probabilities, and so all ratios, are of the whole one at the sampling "
        "temperature: what is cut off is corrected for by nothing"
    )
