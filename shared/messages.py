"""Every message that crosses a stream: typed, msgpack on the wire, arrays as raw bytes.

Adding an optional field keeps `version`; readers ignore unknown fields. Anything else is a new
class beside the old one until no old message can be in flight. Invariants are checked here, where a
message is built, so nobody checks again.
"""

import math
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.arrays import Float32, Int32
from shared.errors import Rejected

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_NESTING = 32
MAX_SCORE = 1e6  # either way; sums and squares of scores stay far from what a float64 can hold


class Message(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", arbitrary_types_allowed=True, use_attribute_docstrings=True
    )
    max_bytes: ClassVar[int] = MAX_MESSAGE_BYTES

    def pack(self) -> bytes:
        return cast(bytes, msgpack.packb(self.model_dump()))

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        """Decode and validate; a body that can never become right raises `Rejected`."""
        if len(body) > cls.max_bytes:
            raise Rejected(f"{cls.__name__}: {len(body)} bytes exceed {cls.max_bytes}")
        try:
            return cls.model_validate(msgpack.unpackb(body))
        except ValidationError as err:
            first = err.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise Rejected(f"{cls.__name__}.{place}: {first['msg']}") from err
        except (ValueError, msgpack.UnpackException, RecursionError) as err:
            raise Rejected(f"{cls.__name__}: not msgpack ({err})") from err


class SamplingParams(Message):
    """How one completion is sampled; recorded log-probabilities are at `temperature`."""

    temperature: float = Field(1.0, gt=0)
    """Of the softmax that is sampled from."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The smallest set of tokens that holds so much probability."""
    top_k: int = Field(0, ge=0, lt=2**31, description="0 keeps every token")
    min_p: float = Field(
        0.0, ge=0, le=1, description="tokens below this share of the likeliest one's are left out"
    )
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off a token's logit for each time that it came."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off the logit of every token that came."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Divides positive and multiplies negative logits of tokens that came."""
    max_response_tokens: int = Field(gt=0)
    """Then the completion ends, with `length`."""
    stop_token_ids: list[int] = Field(
        [], max_length=1024, description="none: nothing but the length ends it"
    )

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on which tokens came before, beyond the model."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


class PromptGroup(Message):
    """One prompt to be sampled `num_samples` times. Example group_id: 'demo-1f3a.g000017'."""

    version: Literal[1] = 1
    job_id: str
    group_id: str
    draw: int = Field(description="position in the job's order of draws")
    prompt_token_ids: Int32  # [P]
    prompt_text: str = ""
    gold: str
    grader: str
    num_samples: int = Field(gt=0)
    extra_samples: int = Field(0, ge=0, description="begun as well; the first to end are kept")
    sampling: SamplingParams
    seed: int = Field(description="sample i of the group is seeded by (seed, i)")
    min_policy_version: int = Field(ge=0)

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if len(self.prompt_token_ids) == 0:
            raise ValueError("prompt_token_ids is empty")
        return self


class VersionSpan(Message):
    """`num_tokens` consecutive response tokens were sampled by `policy_version`."""

    policy_version: int = Field(ge=0)
    num_tokens: int = Field(gt=0)


FinishReason = Literal["stop", "length", "abort"]


class Rollout(Message):
    """One sampled completion: R response tokens (the stop token included) and their log-probs."""

    rollout_id: str
    response_token_ids: Int32  # [R]
    logprobs: Float32  # [R] of the sampled tokens, at the sampling temperature
    version_spans: list[VersionSpan]
    finish_reason: FinishReason
    text: str = Field(description="decoded response, stop token left out")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        length = len(self.response_token_ids)
        if len(self.logprobs) != length:
            raise ValueError(f"{len(self.logprobs)} logprobs for {length} response tokens")
        spans = sum(span.num_tokens for span in self.version_spans)
        if spans != length:
            raise ValueError(f"version_spans cover {spans} of {length} response tokens")
        return self

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version in it; None for an empty response."""
        return min((span.policy_version for span in self.version_spans), default=None)


class StoredRoutes(Message):
    """Where a group's routes are: in a key of its own, named by the digest of its value."""

    digest: str = Field(pattern="^[0-9a-f]{32}$", description="xxh3-128")
    num_bytes: int = Field(ge=0)


class RolloutGroup(Message):
    """All completions of one prompt, ready to be graded."""

    version: Literal[1] = 1
    prompt: PromptGroup
    replica: str
    rollouts: list[Rollout]
    sampled_at_s: float
    sampling_s: float
    routes: StoredRoutes | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(self.rollouts) != self.prompt.num_samples:
            expected = self.prompt.num_samples
            raise ValueError(f"{len(self.rollouts)} rollouts, num_samples is {expected}")
        return self


def score_fault(value: float) -> str | None:
    """Why a number is no score."""
    if not math.isfinite(value):
        return f"value {value} is not finite"
    if abs(value) > MAX_SCORE:
        return f"value {value:g} is beyond the bound of a score, {MAX_SCORE:g} either way"
    return None


class Score(Message):
    """A value: the answer could be read and judged."""

    kind: Literal["score"] = "score"
    """Tells outcomes apart."""
    value: float = Field(description=f"what the answer is worth, at most {MAX_SCORE:g} either way")
    extracted: str = Field("", description="the answer the grader read")
    reason: str = ""
    """How the grader came to it."""
    unshaped: float | None = None
    """Before parts and the penalty for length were added; null: nothing was."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if fault := score_fault(self.value) or score_fault(self.correctness):
            raise ValueError(fault)
        return self

    @property
    def correctness(self) -> float:
        """What the answer is worth by itself."""
        return self.value if self.unshaped is None else self.unshaped


class Unparseable(Message):
    """No answer was found in the response."""

    kind: Literal["unparseable"] = "unparseable"
    """Tells outcomes apart."""
    reason: str = ""
    """Why nothing could be read."""


class Timeout(Message):
    """The check took too long."""

    kind: Literal["timeout"] = "timeout"
    """Tells outcomes apart."""
    after_s: float
    """The limit that was reached, in seconds."""


class GraderError(Message):
    """The check itself failed; it says nothing of the answer."""

    kind: Literal["error"] = "error"
    """Tells outcomes apart."""
    reason: str
    """What failed."""


Outcome = Annotated[Score | Unparseable | Timeout | GraderError, Field(discriminator="kind")]


class ScoredGroup(Message):
    """A graded group: outcome i belongs to rollout i. Only a `Score` reaches an advantage."""

    version: Literal[1] = 1
    group: RolloutGroup
    outcomes: list[Outcome]
    grading_s: float

    @model_validator(mode="after")
    def _one_outcome_each(self) -> Self:
        if len(self.outcomes) != len(self.group.rollouts):
            raise ValueError(f"{len(self.outcomes)} outcomes, {len(self.group.rollouts)} rollouts")
        return self


class TrainingSample(Message):
    """One rollout as the actor sees it: T = P prompt + R response tokens."""

    rollout_id: str
    group_id: str
    token_ids: Int32  # [P + R]
    num_prompt_tokens: int = Field(gt=0)
    sampler_logprobs: Float32  # [R]
    advantage: float
    reward: float
    oldest_version: int
    version_spans: list[VersionSpan] = Field(
        [], description="who sampled which response tokens; empty: `oldest_version` all of them"
    )
    routes: bytes | None = Field(
        None, description="the sampler's choices at the P + R - 1 inputs (shared/routes.py)"
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        num_response = len(self.token_ids) - self.num_prompt_tokens
        if num_response != len(self.sampler_logprobs):
            raise ValueError(f"{len(self.sampler_logprobs)} logprobs, {num_response} tokens")
        return self

    @property
    def spans(self) -> list[VersionSpan]:
        """Of all response tokens, in order."""
        if self.version_spans or not len(self.sampler_logprobs):
            return self.version_spans
        num = len(self.sampler_logprobs)
        return [VersionSpan(policy_version=self.oldest_version, num_tokens=num)]


class UntrainedReward(Message):
    """What a response earned that has no token to train: it counts in its group's baseline."""

    group_id: str
    reward: float


class TrainingBatch(Message):
    """Everything one optimiser step needs; durable in the redo log before the step is taken."""

    max_bytes: ClassVar[int] = 2**30  # routes are in it, and it never crosses the broker

    version: Literal[1] = 1
    job_id: str
    step: int = Field(ge=1, description="the step that this batch becomes; counts from 1")
    policy_version: int = Field(ge=0, description="the version being trained")
    temperature: float = Field(gt=0)
    samples: list[TrainingSample]
    group_ids: list[str]
    untrained: list[UntrainedReward] = []
    supervised: bool = Field(False, description="responses are examples: their likelihood grows")


class ProfileAnnounced(Message):
    """While it stands in the job's announcement, every service records what it does."""

    job_id: str
    profile_id: str
    max_spans: int = Field(gt=0, description="that one process keeps")


class SpanBatch(Message):
    """What one process did, in the order of its ends; times are its monotonic clock's."""

    version: Literal[1] = 1
    profile_id: str
    service: str
    replica: str
    process: str = Field(description="the replica, or its engine: 'rollout-0 engine'")
    host: str
    pid: int
    boot_id: str = Field(description="processes of one boot have one monotonic clock")
    clock_offset_ns: int = Field(description="the broker's clock less that one")
    clock_uncertainty_ns: int = Field(ge=0, description="half of the round trip that measured it")
    num_dropped: int = Field(ge=0, description="spans that did not fit so far")
    is_last: bool = False
    spans: list[tuple[str, str, int, int, dict[str, Any]]] = Field(
        description="name, track, begin and end in nanoseconds, facts"
    )


class JobAnnounced(Message):
    """What services must know of the job in progress; `state` ends with 'finished'."""

    version: Literal[1] = 1
    job_id: str
    state: Literal["active", "finished"]
    trainer_url: str
    job: dict[str, Any] = Field(description="the resolved job document (shared/job.py)")
    profile: ProfileAnnounced | None = None


class WeightsAnnounced(Message):
    """Version `policy_version` is current: a server that serves less takes no new work."""

    version: Literal[1] = 1
    job_id: str
    policy_version: int
    trainer_url: str
    published_at_s: float


class EvalRequested(Message):
    """Evaluate exactly `policy_version` on `replica`, which is held at it until the result."""

    version: Literal[1] = 1
    job_id: str
    eval_id: str
    policy_version: int
    step: int
    deadline_s: float = Field(description="unix time after which the result is not waited for")


class Event(Message):
    """Something a service saw; `fields` are plain JSON values. Example name: 'group_sampled'."""

    version: Literal[1] = 1
    """Of this format."""
    name: str
    """What happened: `step`, `eval_finished`, `weights_published` and so on."""
    job_id: str
    """The job that it belongs to."""
    service: str
    """Who saw it: `trainer`, `rollout`, `reward` or `evaluator`."""
    replica: str
    """Which one of them."""
    at_s: float
    """Unix time in seconds."""
    fields: dict[str, Any] = {}
    """A free map of plain JSON values: which there are depends on `name`."""
