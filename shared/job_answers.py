"""What the trainer tells of its jobs over REST, as its routes answer it and its client reads it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.messages import Event
from shared.registry import Replica

JobState = Literal["queued", "running", "paused", "finished", "failed", "cancelled"]
ENDED: tuple[JobState, ...] = ("finished", "failed", "cancelled")


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Submitted(_Answer):
    """Example: {"job_id": "sums-1f3a", "warnings": []}."""

    job_id: str
    """The job's name from now on, `<name>-<4 hexadecimal digits>`."""
    warnings: list[str]
    """What the job does without, one sentence each."""


class JobStatus(_Answer):
    """Example: state 'running', step 12 of 60 steps, policy_version 12."""

    job_id: str
    """The job's name, `<name>-<4 hexadecimal digits>`."""
    name: str
    """`name` of its document."""
    state: JobState
    """`paused` can be resumed, so can `failed`; `finished` and `cancelled` are for good."""
    step: int = Field(ge=0)
    """The newest step that is trained and kept; 0 before the first."""
    steps: int = Field(ge=1)
    """Steps in all."""
    policy_version: int = Field(ge=0)
    """The version that `step` made; 0 is the policy as it was given."""
    created_at_s: float
    """Unix time of its submission, in seconds."""
    error: str | None
    """Why it is paused or failed; null where nothing went wrong."""
    wish: Literal["pause", "cancel"] | None
    """What was asked for and has not happened yet; null: nothing."""
    doing: str | None
    """What a running job is at, such as 'training step 5'; null unless it runs."""
    warnings: list[str]
    """What the job does without, and a rollback that is on; one sentence each."""
    counts: dict[str, int]
    """Number of groups by state, and by reason as `dropped:no_variance`."""
    last: dict[str, float]
    """Numbers of the newest step by name, such as `reward` and `step_seconds`; empty before it."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


class JobList(_Answer):
    """Every job that this trainer's queue holds."""

    jobs: list[JobStatus]
    """In the order of their submission, the newest last."""


class RunOverview(_Answer):
    """The run for a screen: of a bounded size, however long the run is."""

    after: int = Field(ge=0)
    """Lines of the run's events.jsonl that are covered; `…/events?after=` goes on from there."""
    num_steps: int = Field(ge=0)
    """Steps trained so far."""
    events: list[Event]
    """By time: the steps (at most 1,000; in a longer run each is the mean of equally many, with
    `num_steps` in its fields), all evaluations, and the last updates and other events."""
    counts: dict[str, int]
    """Number of all events by name."""
    dropped: dict[str, int]
    """Number of dropped groups by reason, the most frequent first."""


class ServerList(_Answer):
    """Who renews its entry in the registry."""

    servers: list[Replica]
    """Live replicas of trainer, rollout, reward and evaluator, in this order and by name."""


class IdleShares(_Answer):
    """One process of a profile: shares of the time profiled, 0 to 1."""

    process: str
    """Its name, such as `rollout-0`."""
    kind: str
    """What it is: `trainer`, `rank`, `rollout`, `engine`, `reward` or `evaluator`."""
    works: float
    """Share in which it works."""
    waits: float
    """Share in which it waits for others."""
    waits_for: dict[str, float]
    """Parts of `waits` by the process waited for; `hand-over`: the message is on its way."""
    nothing_to_do: float
    """Share in which there is no work for it; with `works` and `waits` it adds up to 1."""


class ProfileResult(_Answer):
    """Who worked and who waited for whom while a profile was taken."""

    job_id: str
    """The job that was profiled."""
    profile_id: str
    """The profile's name."""
    steps: int = Field(ge=0)
    """Steps that were profiled."""
    seconds: float = Field(ge=0)
    """How long they took."""
    dropped_spans: dict[str, int]
    """Number of spans that did not fit, by process; one that lost none is not listed."""
    clock_uncertainty_s: float
    """How far the processes' clocks may be apart, in seconds."""
    missing: list[str]
    """Replicas that told nothing in time."""
    sentences: list[str]
    """What stands out, for people."""
    most_waited_for: str | None
    """The process that others waited for longest; null: nobody waited."""
    processes: list[IdleShares]
    """Each process, in the order of the time line."""


class ProfileStatus(_Answer):
    """Example: state 'recording', 1 of 3 steps seen."""

    profile_id: str
    """Its name, and that of its folder in the run's `profiles/`."""
    state: Literal["asked", "recording", "done", "failed"]
    """Where it is; the last two are for good."""
    steps: int = Field(ge=0)
    """Steps asked for."""
    steps_seen: int = Field(ge=0)
    """Steps seen so far; fewer than asked for when the job ended first."""
    error: str
    """Why it failed; empty where it did not."""
    result: ProfileResult | None
    """What it shows; null until it is done."""


class KeptVersion(_Answer):
    """A version that can be served again."""

    policy_version: int = Field(ge=0)
    """Its number."""
    is_whole: bool
    """Whether it is kept as whole weights; if not, it is rebuilt from what changed."""
    stored_bytes: int = Field(ge=0)
    """What it takes on disk."""
    base_version: int | None
    """The version that its changes start from; null: it is whole."""
    effective_checksum: str | None
    """xxh3-128 of what servers hold of it, or of what was published where they disagreed,
    hexadecimal; null before one has served it."""
    servers: list[str]
    """Names of the servers that serve it now."""


class KeptVersions(_Answer):
    """Every version of the job in progress that can be served."""

    current: int | None
    """The newest version; null before the first is published."""
    rolled_back_to: int | None
    """The older version that servers shall serve instead; null: the current one."""
    versions: list[KeptVersion]
    """Oldest first."""
