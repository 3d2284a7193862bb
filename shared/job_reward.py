"""Names of graders and what is added to a score; the sections of a job that reward speaks about."""

import re
from typing import Annotated, Literal, Self

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


class RewardSection(Section):
    grader: GraderName = "math"
    """`math` (MATH, DeepMath), `aime`, `gsm8k`, `dapo`, `code`, `format`, `arithmetic`; one that
    the reward service knows as `plugin.<name>` or `remote.<name>`."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Further graders whose scores are added by weight."""
    overlong: OverlongSection | None = None
    """The penalty for long responses (DAPO)."""
    retries: int = Field(0, ge=0, le=5)
    """How often a check that timed out or failed is repeated before it counts as unscored."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """Wall-clock limit of one check, enforced from outside."""
    unscored: Literal["drop_group", "zero"] = "drop_group"
    """What a group with an unparseable, timed-out or failed check becomes. Unparseable text is an
    answer that earns nothing under `zero`; time-outs and errors drop the group either way."""
