"""Names of graders and what is added to a score; the sections of a job that reward speaks about."""

import re
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from shared.section import Section

BUILT_IN = ("math", "aime", "gsm8k", "dapo", "code", "format", "arithmetic")
PLUG_IN, REMOTE = "plugin.", "remote."
_OUTSIDE = re.compile(r"(?:plugin|remote)\.[a-z0-9][a-z0-9_-]{0,60}")


def _known(name: str) -> str:
    if name not in BUILT_IN and not _OUTSIDE.fullmatch(name):
        raise ValueError(
            f"no grader {name!r}; there are {', '.join(BUILT_IN)}, plugin.<name>, remote.<name>"
        )
    return name


GraderName = Annotated[str, AfterValidator(_known)]


class RewardPart(Section):
    """One more grader of the same response. Example: grader = "format", weight = 0.1."""

    grader: GraderName
    """Name of the grader."""
    weight: float = 1.0
    """What its score is multiplied by."""


class OverlongSection(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), added to the score."""

    max_tokens: int = Field(gt=0)
    """Responses of so many tokens or more lose the whole weight."""
    buffer_tokens: int = Field(gt=0)
    """The last tokens before `max_tokens`, over which the loss grows from nothing."""
    weight: float = Field(1.0, gt=0)
    """What the punishment is multiplied by."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} exceeds max_tokens {self.max_tokens}"
            )
        return self


Unscored = Literal["drop_group", "zero"]
Retried = Literal["timeout", "error"]


class UnscoredSection(Section):
    """What a sample without a score means, by its outcome: its group is not trained on, or the
    sample earns 0. Zeros for a slow or broken grader punish the policy for what it did not do."""

    unparseable: Unscored = "drop_group"
    """No answer, or none that can be read; as `zero` it is a wrong answer."""
    timeout: Unscored = "drop_group"
    """The check used up its time, the last repetition's, too."""
    error: Unscored = "drop_group"
    """The grader failed, or the gold is unusable, in the last repetition, too."""


class RewardSection(Section):
    """Who grades a response, and what the outcome is worth."""

    grader: GraderName = "math"
    """`math` (MATH, DeepMath), `aime`, `gsm8k`, `dapo`, `code`, `format`, `arithmetic`; one that
    the reward service knows as `plugin.<name>` or `remote.<name>`."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Further graders whose scores are added by weight."""
    overlong: OverlongSection | None = None
    """The penalty for long responses (DAPO)."""
    retries: int = Field(0, ge=0, le=5)
    """How often a check whose outcome is in `retried` is repeated before it counts as unscored."""
    retried: list[Retried] = Field(default_factory=lambda: list(get_args(Retried)))
    """The outcomes for which a check is repeated."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """Wall-clock limit of one check, enforced from outside."""
    unscored: UnscoredSection = UnscoredSection()
    """What unparseable, timed-out and failed checks mean; one outcome that drops is enough."""
