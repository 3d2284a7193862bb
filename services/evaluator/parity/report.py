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
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Figures(_Part):
    """Δ = log p(ours) - log p(theirs); k1 and k3 estimate KL(ours ‖ theirs) of sampled tokens."""

    num_sequences: int
    """Sequences compared."""
    num_tokens: int
    """Tokens compared."""
    num_not_finite: int
    """Tokens without a number on one side."""
    mean: Number
    """Mean |Δ log p|."""
    p50: Number
    """Median |Δ log p|."""
    p99: Number
    """99th percentile of |Δ log p|."""
    max: Number
    """Largest |Δ log p|."""
    k1: Number
    """Mean of log p differences, an estimate of the KL divergence."""
    k3: Number
    """Low-variance estimate of the KL divergence, never negative."""


class Worst(_Part):
    """One token in context; texts are None where no tokenizer is known."""

    sequence: int
    """Which sequence."""
    position: int
    """Which token of it."""
    token_id: int
    """The token."""
    ours: Number
    """Our log p of it; null: no finite number."""
    theirs: Number
    """The other side's; null: no finite number."""
    delta: Number
    """Ours minus theirs; null where one of them is."""
    before: list[int]
    """Token ids before it."""
    after: list[int]
    """Token ids after it."""
    before_text: str | None = None
    """The text before it."""
    token_text: str | None = None
    """Its own text."""
    after_text: str | None = None
    """The text after it."""


class PositionBin(_Part):
    """Tokens whose place in their sequence is in [start, stop)."""

    start: int
    """First position of the bin."""
    stop: int
    """Position behind its last one."""
    num: int
    """Tokens in it."""
    mean: Number
    """Their mean |Δ log p|."""
    max: Number
    """Their largest |Δ log p|."""


class Histogram(_Part):
    """Bin i holds the tokens with edges[i] <= |Δ log p| < edges[i + 1]."""

    edges: list[float]
    """Bounds of the bins of |Δ log p|."""
    counts: list[int]
    """Tokens in each bin."""


class ReportBounds(_Part):
    """What still passes; null does not bound."""

    mean: float | None
    """Bound of the mean."""
    p99: float | None
    """Bound of the 99th percentile."""
    max: float | None
    """Bound of the largest."""
    k3: float | None
    """Bound of k3."""


class ParityReport(_Part):
    """GET /v1/parity/{id}, `parity --json`. Example verdict: 'mean |Δ log p| 0.05 exceeds 0.04'."""

    ours: str
    """The one side."""
    theirs: str
    """The other side."""
    passed: bool
    """Whether no bound was exceeded and no layer walk named a departure."""
    violations: list[str]
    """Which bounds were, one sentence each."""
    bounds: ReportBounds
    """What was allowed."""
    figures: Figures
    """What was measured."""
    sampled_by_ours: bool
    """Whether our side sampled the tokens."""
    policy_version: int | None = None
    """The version that both held."""
    temperature: float = 1.0
    """Log-probabilities are at this temperature."""
    argmax_agreement: Number = None
    """Share of positions at which both would choose the same token."""
    routing_agreement: dict[int, float] | None = None
    """Share of expert choices that agree, by layer; null where one side does not tell them."""
    decoding: Figures | None = None
    """The sampler against itself: what it recorded while sampling, and its score of the same."""
    worst: list[Worst]
    """The tokens that differ most."""
    by_position: list[PositionBin]
    """|Δ log p| along the sequence."""
    histogram: Histogram
    """How |Δ log p| is distributed."""
    walk: WalkResult | None = None
    """Where the inner states part."""
    notes: list[str] = []
    """What the comparison could not tell."""
    seconds: float = 0.0
    """How long it took, in seconds."""
    at_s: float
    """Unix time of its end."""


class ParityStatus(_Part):
    """GET /v1/parity/{id}; `report` is there once `state` is 'finished'."""

    parity_id: str
    """Its name."""
    state: Literal["queued", "running", "finished", "failed"]
    """Where it is."""
    error: str = ""
    """Why it failed."""
    report: ParityReport | None = None
    """What was found, once it is there."""


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
    if run.walk is not None and run.walk.first is not None:
        broken.append(f"the layer walk names a departure: {run.walk.verdict}")
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
