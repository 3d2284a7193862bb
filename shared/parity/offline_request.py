"""What is asked of `python -m shared.parity.offline` and what it answers; no torch here.

The command line writes a request, starts the child, reads the result: so it never loads torch.
"""

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.parity.walk import Walk

Rounding = Literal["plain", "served", "release"]
WalkMode = Literal["none", "chained", "isolated"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Side(_Part):
    """A release directory and how activations are rounded. Example: `assets/tiny-dsv4@served`."""

    path: Path
    rounding: Rounding = "plain"

    @classmethod
    def parse(cls, text: str) -> Self:
        """`DIR` or `DIR@plain|served|release`; ValueError names what is allowed."""
        path, at, rounding = text.rpartition("@")
        if not at or "/" in rounding:
            return cls(path=Path(text))
        if rounding not in ("plain", "served", "release"):
            raise ValueError(f"{text}: rounding {rounding!r} is not plain, served or release")
        return cls(path=Path(path), rounding=rounding)

    def __str__(self) -> str:
        return f"{self.path}@{self.rounding}"


class OfflineRequest(_Part):
    """Either tokens to score, or prompts that `ours` completes."""

    ours: Side
    theirs: Side
    sequences: list[list[int]] | None = None
    prompts: list[str] | None = None
    num_samples: int = Field(4, gt=0)
    max_response_tokens: int = Field(64, gt=0)
    temperature: float = Field(1.0, gt=0)
    seed: int = 0
    walk: WalkMode = "none"
    tolerance: float = Field(1e-4, gt=0)
    dtype: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        if (self.sequences is None) == (self.prompts is None):
            raise ValueError("give either sequences or prompts")
        short = [i for i, tokens in enumerate(self.sequences or []) if len(tokens) < 2]
        if short:
            raise ValueError(f"sequence {short[0]} has fewer than 2 tokens: nothing to score")
        if not (self.sequences or self.prompts):
            raise ValueError("there is no sequence and no prompt")
        return self


class WalkPoint(_Part):
    """`departure` is None where a value is not finite; `share` is that of rows that depart."""

    name: str
    """Of the sub-module."""
    label: str
    """In words."""
    departure: float | None
    """Relative difference of the states behind it."""
    row: int
    """The token that departs most."""
    share: float = 0.0
    """Share of tokens beyond the tolerance."""
    weight: float | None = 0.0
    """How much of what may depart does; beyond 1 the point departs."""

    @property
    def size(self) -> float:
        """The departure as a number: without bound where a value is not finite."""
        return math.inf if self.departure is None else self.departure


class WalkResult(_Part):
    """`isolated`: each block got the streams of `ours`, so that departures do not add up."""

    mode: WalkMode
    """How the states were compared."""
    verdict: str
    """What the walk says, in a sentence."""
    first: str | None
    """The first sub-module that departs."""
    suspects: list[str]
    """Others that may."""
    tolerance: float
    """What still counts as equal."""
    row_share: float = 0.0
    """Share of tokens that must depart."""
    num_tokens: int
    """Tokens walked."""
    points: list[WalkPoint]
    """Sub-modules in order."""

    @classmethod
    def of(cls, walk: Walk, *, mode: WalkMode, num_tokens: int) -> Self:
        points = [
            WalkPoint(
                name=point.name,
                label=point.label,
                departure=point.departure if math.isfinite(point.departure) else None,
                row=point.row,
                share=point.share,
                weight=point.weight if math.isfinite(point.weight) else None,
            )
            for point in walk.points
        ]
        return cls(
            mode=mode,
            verdict=walk.verdict,
            first=walk.first.label if walk.first else None,
            suspects=list(walk.suspects),
            tolerance=walk.tolerance,
            row_share=walk.row_share,
            num_tokens=num_tokens,
            points=points,
        )


class OfflineResult(_Part):
    """`ours[i]` and `theirs[i]` are log p of `sequences[i][first[i]:]`; they may be NaN."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    sequences: list[list[int]]
    first: list[int]
    ours: list[list[float]]
    theirs: list[list[float]]
    argmax_agreement: float
    routing_agreement: dict[int, float]
    walk: WalkResult | None = None
    notes: list[str] = []
    seconds: float
