"""What the preflight found, as the fields of its event; and the refusal."""

from dataclasses import asdict, dataclass, field
from typing import Any

from shared.errors import TandemError


class PreflightRefused(TandemError):
    """The job is beyond the bounds of its preflight; the text says where."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `needed` is compared with `available`, None where nothing is compared."""

    parts: dict[str, int]
    needed: int
    available: int | None


@dataclass(frozen=True, slots=True)
class ServerParity:
    """One sampler against the ranks, on tokens that it sampled.

    `alike` is mean |Δ log p| with the ranks rounding as the sampler, `own` as they train; `walked`
    is the layer walk's verdict, None for an engine without inner states.
    """

    server: str
    num_tokens: int
    alike_mean: float
    alike_max: float
    own_mean: float
    walked: str | None
    departs_at: str | None


@dataclass(frozen=True, slots=True)
class DryUpdate:
    """One transaction up to the switch, which is left out."""

    server: str
    seconds: float
    probe_mean_abs_delta: float | None
    is_same: bool
    """Whether what would be effective is what is served."""


@dataclass(slots=True)
class Findings:
    memory: MemoryPlan | None = None
    parity: list[ServerParity] = field(default_factory=list)
    dry_updates: list[DryUpdate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """What could not be asked: no problem, and nobody vouches for it."""
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        """Of the event `preflight_finished`."""
        return {"passed": not self.problems, **asdict(self)}
