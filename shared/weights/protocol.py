"""The update transaction on the wire: what the publisher sends a rollout server and gets back.

`begin` -> staging -> staged -> commit -> active; any failure leaves the previous version serving.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.weights.manifest import Checksum, Manifest

UpdateState = Literal["staging", "staged", "activating", "active", "failed", "aborted"]
PauseMode = Literal["in_place", "retract", "abort"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeSequence(_Strict):
    """Fixed tokens and the trainer's own log-probabilities of them (of tokens 1..T-1).

    The first `num_context_tokens` are only read; the tokens after them are compared.
    """

    token_ids: list[int] = Field(min_length=2)
    logprobs: list[float]
    num_context_tokens: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _something_is_compared(self) -> Self:
        if self.num_context_tokens >= len(self.token_ids):
            raise ValueError(
                f"{self.num_context_tokens} context tokens leave none of {len(self.token_ids)}"
            )
        return self


class Probe(_Strict):
    """The new version must score `sequences` within `max_mean_abs_delta` of the trainer."""

    sequences: list[ProbeSequence]
    max_mean_abs_delta: float = Field(gt=0)


class BeginUpdate(_Strict):
    """POST /v1/weights/updates -> 202. The same version again is the same update."""

    job_id: str
    version: int = Field(ge=0)
    base_version: int | None = None
    manifest: Manifest
    sources: list[str] = Field(min_length=1, description="base URLs of registered peers")


class CommitUpdate(_Strict):
    """POST /v1/weights/updates/{version}/commit."""

    pause_mode: PauseMode = "in_place"
    probe: Probe | None = None


class UpdateStatus(_Strict):
    """GET /v1/weights/updates/{version}."""

    version: int
    state: UpdateState
    staged_bytes: int = 0
    total_bytes: int = 0
    error: str = ""


class CommitResult(_Strict):
    """200 of a commit: seconds of each phase, the probe, and what is now effective."""

    version: int
    pause_s: float
    load_s: float
    restore_s: float
    probe_s: float
    resume_s: float
    probe_mean_abs_delta: float | None = None
    effective_checksum: Checksum
