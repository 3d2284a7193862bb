"""The result of a parity run as plain JSON values: statistics, verdict, worst tokens in context."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from shared.parity.offline_request import WalkResult
from shared.parity.scores import Bounds, Comparison, ScoredSequence, WorstToken, compare, violations
from shared.telemetry import now_s


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, AfterValidator(_finite)]
"""None where there is no finite value: JSON has none."""
Decode = Callable[[list[int]], str]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Figures(_Part):
    """Δ = log p(ours) - log p(theirs); k1 and k3 estimate KL(ours ‖ theirs) of sampled tokens."""

    num_sequences: int
    num_tokens: int
    num_not_finite: int
    mean: Number
    p50: Number
    p99: Number
    max: Number
    k1: Number
    k3: Number


class Worst(_Part):
    """One token in context; texts are None where no tokenizer is known."""

    sequence: int
    position: int
    token_id: int
    ours: Number
    theirs: Number
    delta: Number
    before: list[int]
    after: list[int]
    before_text: str | None = None
    token_text: str | None = None
    after_text: str | None = None


class PositionBin(_Part):
    start: int
    stop: int
    num: int
    mean: Number
    max: Number


class Histogram(_Part):
    edges: list[float]
    counts: list[int]


class ReportBounds(_Part):
    mean: float | None
    p99: float | None
    max: float | None
    k3: float | None


class ParityReport(_Part):
    """GET /v1/parity/{id}, `parity --json`. Example verdict: 'mean |Δ log p| 0.05 exceeds 0.04'."""

    ours: str
    theirs: str
    passed: bool
    violations: list[str]
    bounds: ReportBounds
    figures: Figures
    sampled_by_ours: bool
    policy_version: int | None = None
    temperature: float = 1.0
    argmax_agreement: Number = None
    routing_agreement: dict[int, float] | None = None
    decoding: Figures | None = None
    """The sampler against itself: what it recorded while sampling, and its score of the same."""
    worst: list[Worst]
    by_position: list[PositionBin]
    histogram: Histogram
    walk: WalkResult | None = None
    notes: list[str] = []
    seconds: float = 0.0
    at_s: float


class ParityStatus(_Part):
    """GET /v1/parity/{id}; `report` is there once `state` is 'finished'."""

    parity_id: str
    state: Literal["queued", "running", "finished", "failed"]
    error: str = ""
    report: ParityReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a parity run found, whichever way."""

    ours: str
    theirs: str
    sequences: Sequence[ScoredSequence]
    sampled_by_ours: bool
    temperature: float = 1.0
    policy_version: int | None = None
    argmax_agreement: float | None = None
    routing_agreement: dict[int, float] | None = None
    decoding: Sequence[ScoredSequence] = ()
    walk: WalkResult | None = None
    notes: Sequence[str] = ()
    seconds: float = 0.0


def make_report(run: Run, bounds: Bounds, *, decode: Decode | None = None) -> ParityReport:
    """Compare the run's sequences and judge them; `decode` turns token ids to text."""
    found = compare(run.sequences)
    broken = violations(found, bounds)
    return ParityReport(
        ours=run.ours,
        theirs=run.theirs,
        passed=not broken,
        violations=broken,
        bounds=ReportBounds(**asdict(bounds)),
        figures=_figures(found),
        sampled_by_ours=run.sampled_by_ours,
        policy_version=run.policy_version,
        temperature=run.temperature,
        argmax_agreement=run.argmax_agreement,
        routing_agreement=run.routing_agreement,
        decoding=_figures(compare(run.decoding)) if run.decoding else None,
        worst=[_worst(token, decode) for token in found.worst],
        by_position=[PositionBin(**asdict(part)) for part in found.by_position],
        histogram=Histogram(edges=list(found.histogram.edges), counts=list(found.histogram.counts)),
        walk=run.walk,
        notes=list(run.notes),
        seconds=run.seconds,
        at_s=now_s(),
    )


def _figures(found: Comparison) -> Figures:
    return Figures(**{name: getattr(found, name) for name in Figures.model_fields})


def _worst(token: WorstToken, decode: Decode | None) -> Worst:
    texts: dict[str, Any] = {}
    if decode is not None:
        texts = {
            "before_text": decode(list(token.before)),
            "token_text": decode([token.token_id]),
            "after_text": decode(list(token.after)),
        }
    return Worst(
        sequence=token.sequence,
        position=token.position,
        token_id=token.token_id,
        ours=token.ours,
        theirs=token.theirs,
        delta=token.delta,
        before=list(token.before),
        after=list(token.after),
        **texts,
    )
