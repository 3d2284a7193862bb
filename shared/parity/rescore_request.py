"""What is asked of `python -m services.rollout.rescore` and what it answers; no torch here."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shared.job import Job


class RescoreRequest(BaseModel):
    """One sequence, to be scored by the job's sampler under each version in `folders`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: Job
    folders: dict[int, Path] = Field(min_length=1, description="version -> its shards and manifest")
    token_ids: list[int] = Field(min_length=2)
    temperature: float = Field(gt=0)


class RescoreResult(BaseModel):
    """Of tokens 1.. by version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    logprobs: dict[int, list[float]]
