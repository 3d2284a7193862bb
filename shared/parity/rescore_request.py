"""What is asked of `python -m services.rollout.rescore` and what it answers; no torch here."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shared.job import Job
from shared.messages import VersionSpan


class RescoreRequest(BaseModel):
    """One completion, to be scored by the job's sampler as it sampled it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: Job
    folders: dict[int, Path] = Field(min_length=1, description="version -> its shards and manifest")
    token_ids: list[int] = Field(min_length=2)
    spans: list[VersionSpan] = Field(min_length=1, description="of the last tokens, in order")
    temperature: float = Field(gt=0)


class RescoreResult(BaseModel):
    """Of the response tokens, each under its own version: computed as when they were sampled, and
    by one prefill, which runs the same sums in another order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    logprobs: list[float]
    prefilled: list[float]
