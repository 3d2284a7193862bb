"""The update transaction on the wire: what the publisher sends a rollout server and gets back.

`begin` -> staging -> staged -> commit -> active; any failure leaves the previous version serving.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.weights.manifest import Checksum, Manifest

UpdateState = Literal["staging", "staged", "activating", "active", "failed", "aborted"]
PauseMode = Literal["in_place", "retract", "abort"]
Count = Annotated[int, Field(ge=0, lt=2**63)]  # what counters and events can take


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ProbeSequence(_Strict):
    """Fixed tokens and the trainer's own log-probabilities of them (of tokens 1..T-1).

    The first `num_context_tokens` are only read; the tokens after them are compared.
    """

    token_ids: list[int] = Field(min_length=2)
    """The tokens."""
    logprobs: list[float]
    """What the trainer gives them."""
    num_context_tokens: int = Field(1, ge=1)
    """The first so many are not scored."""

    @model_validator(mode="after")
    def _something_is_compared(self) -> Self:
        if self.num_context_tokens >= len(self.token_ids):
            raise ValueError(
                f"{self.num_context_tokens} context tokens leave none of {len(self.token_ids)}"
            )
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens, "
                f"{len(self.token_ids) - 1} expected"
            )
        return self


class Probe(_Strict):
    """The new version must score `sequences` within `max_mean_abs_delta` of the trainer."""

    sequences: list[ProbeSequence]
    """What is scored."""
    max_mean_abs_delta: float = Field(gt=0)
    """Beyond this the version is refused."""


class GroupTransfer(_Strict):
    """One member's part in a process group that moves a version's shards; rank 0 has the store."""

    name: str = Field(description="of this attempt, so that no other one's members meet it")
    backend: Literal["gloo", "nccl"]
    """`nccl` or `gloo`."""
    host: str
    """Of the group's rendezvous."""
    port: int = Field(gt=0, le=65535)
    """Of the group's rendezvous."""
    rank: int = Field(ge=0)
    """Of the receiver."""
    members: list[str] = Field(min_length=2, description="by rank: owners of parts, then servers")
    deadline_s: float = Field(gt=0)
    """Seconds for the whole transfer."""

    @property
    def size(self) -> int:
        return len(self.members)


class BeginUpdate(_Strict):
    """POST /v1/weights/updates -> 202. The same version again is the same update.

    A server that holds `base_version` may pull the manifest's delta instead of whole shards; where
    that is not possible or comes to other bytes it pulls the shard by itself.
    """

    job_id: str
    """The job that the weights are of."""
    version: int = Field(ge=0)
    """The version to stage."""
    base_version: int | None = None
    """The version that changes are of; null: whole tensors."""
    manifest: Manifest
    """Names, shapes, places and checksums of all tensors."""
    sources: list[str] = Field(
        description="base URLs of registered peers that may have any shard, in the order to ask"
    )
    owners: list[str] = Field(
        default_factory=list,
        description="base URL of the node of each part; asked after `sources` for its shards",
    )
    group: GroupTransfer | None = Field(
        None, description="take the shards from this group; what is missing then is pulled"
    )
    is_rollback: bool = Field(False, description="serve an older version than the active one")

    @model_validator(mode="after")
    def _every_shard_has_a_source(self) -> Self:
        parts = self.manifest.num_parts
        if not self.sources and len(self.owners) < parts:
            raise ValueError(f"no sources, and {len(self.owners)} owners of {parts} parts")
        return self


class CommitUpdate(_Strict):
    """POST /v1/weights/updates/{version}/commit."""

    pause_mode: PauseMode = "in_place"
    """What becomes of completions under way."""
    probe: Probe | None = None
    """What has to hold before the version is served."""
    effective_checksum: Checksum | None = Field(
        None,
        description="what others compute with who serve this version, or what the trainer says was "
        "published; a server that comes to another refuses with 412",
    )


class UpdateStatus(_Strict):
    """GET /v1/weights/updates/{version}."""

    version: int
    """The version."""
    state: UpdateState
    """How far it is."""
    staged_bytes: Count = 0
    """What is here."""
    total_bytes: Count = 0
    """What there is."""
    pulled_bytes: Count = Field(0, description="that came over the wire")
    rebuilt_shards: Count = Field(0, description="that were made from the base and what changed")
    error: str = ""
    """Why it failed, with the tensor's name."""
    is_wrong: bool = Field(False, description="what came is not this version: no repeat helps")


class CommitResult(_Strict):
    """200 of a commit: seconds of each phase, the probe, and what is now effective.

    Load, restore and probe may run while the old version samples; sampling stands still for
    `pause_s`, and until running completions are recomputed another `resume_s`.
    """

    version: int
    """The version that is served."""
    pause_s: float
    """How long sampling stood still."""
    load_s: float
    """Copying the weights."""
    restore_s: float
    """Rebuilding quantised state."""
    probe_s: float
    """Scoring the probe."""
    resume_s: float
    """Going on."""
    proven_in_pause: bool = False
    """Whether restore and probe are part of `pause_s`."""
    probe_mean_abs_delta: float | None = None
    """Mean |Δ log p| of the probe."""
    effective_checksum: Checksum
