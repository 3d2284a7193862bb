"""Two engines' log-probabilities of the same tokens, compared; numpy only.

`ours` is the sampler (whose tokens these are, if it sampled them), `theirs` the other side. A value
that is not finite is never averaged away: it is counted, and a report with one does not pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONTEXT_TOKENS = 8
NUM_WORST = 10
NUM_BINS = 40

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """T tokens; both sides give log p of `token_ids[first:]`, T - first values each."""

    token_ids: tuple[int, ...]
    first: int
    ours: Floats
    theirs: Floats

    def __post_init__(self) -> None:
        expected = len(self.token_ids) - self.first
        if self.first < 1 or expected < 1:
            raise ValueError(f"first {self.first} of {len(self.token_ids)} tokens compares none")
        for side, values in (("ours", self.ours), ("theirs", self.theirs)):
            if values.shape != (expected,):
                raise ValueError(f"{side}: {values.shape[0]} values for {expected} tokens")


@dataclass(frozen=True, slots=True)
class WorstToken:
    """One token with its neighbours: `before` and `after` are ids of the same sequence."""

    sequence: int
    position: int
    token_id: int
    ours: float
    theirs: float
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def delta(self) -> float:
        return self.ours - self.theirs


@dataclass(frozen=True, slots=True)
class PositionBin:
    """|Δ log p| of the compared tokens at positions [start, stop) of their sequences."""

    start: int
    stop: int
    num: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Tokens by |Δ log p|: `counts[i]` lie in [edges[i], edges[i + 1]); the edges are powers."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Statistics of Δ = log p(ours) - log p(theirs) over all compared tokens.

    k1 = mean Δ and k3 = mean (e^-Δ - 1 + Δ) estimate KL(ours ‖ theirs) if ours sampled the tokens
    (Schulman, "Approximating KL divergence", 2020); k3 is never negative.
    """

    num_sequences: int
    num_tokens: int
    num_not_finite: int
    mean: float
    p50: float
    p99: float
    max: float
    k1: float
    k3: float
    worst: tuple[WorstToken, ...]
    by_position: tuple[PositionBin, ...]
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class Bounds:
    """What still passes; None does not bound. 0.04 is what an FP8 sampler may differ on average."""

    mean: float | None = 0.04
    p99: float | None = None
    max: float | None = None
    k3: float | None = None


def compare(sequences: Sequence[ScoredSequence], *, num_worst: int = NUM_WORST) -> Comparison:
    """Compare all tokens of all sequences; ValueError without any."""
    if not sequences:
        raise ValueError("no sequences to compare")
    deltas = [sequence.ours - sequence.theirs for sequence in sequences]
    delta_N = np.concatenate(deltas)
    finite_N = delta_N[np.isfinite(delta_N)]
    size_N = np.abs(finite_N)
    p50, p99 = np.quantile(size_N, (0.5, 0.99)) if size_N.size else (np.nan, np.nan)
    return Comparison(
        num_sequences=len(sequences),
        num_tokens=int(delta_N.size),
        num_not_finite=int(delta_N.size - finite_N.size),
        mean=_mean(size_N),
        p50=float(p50),
        p99=float(p99),
        max=float(size_N.max()) if size_N.size else float("nan"),
        k1=_mean(finite_N),
        k3=_mean(np.expm1(-finite_N) + finite_N),
        worst=_worst(sequences, deltas, num_worst),
        by_position=_by_position(sequences, deltas),
        histogram=_histogram(size_N),
    )


def violations(found: Comparison, bounds: Bounds) -> list[str]:
    """One sentence for each bound that is exceeded, and for values that are not finite."""
    named = (
        ("mean |Δ log p|", found.mean, bounds.mean),
        ("p99 of |Δ log p|", found.p99, bounds.p99),
        ("largest |Δ log p|", found.max, bounds.max),
        ("k3", found.k3, bounds.k3),
    )
    sentences = [
        f"{name} {value:.3g} exceeds {bound:g}"
        for name, value, bound in named
        if bound is not None and not value <= bound  # nan exceeds
    ]
    if found.num_not_finite:
        sentences.append(f"{found.num_not_finite} of {found.num_tokens} log p are not finite")
    return sentences


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def _worst(
    sequences: Sequence[ScoredSequence], deltas: Sequence[Floats], num: int
) -> tuple[WorstToken, ...]:
    sizes = np.concatenate([np.abs(delta) for delta in deltas])
    sizes[~np.isfinite(sizes)] = np.inf
    owner = np.repeat(np.arange(len(deltas)), [len(delta) for delta in deltas])
    offset = np.concatenate([np.arange(len(delta)) for delta in deltas])
    order = np.argsort(-sizes, kind="stable")[:num]
    return tuple(_token(sequences, int(owner[i]), int(offset[i])) for i in order)


def _token(sequences: Sequence[ScoredSequence], index: int, offset: int) -> WorstToken:
    sequence = sequences[index]
    at = sequence.first + offset
    return WorstToken(
        sequence=index,
        position=at,
        token_id=sequence.token_ids[at],
        ours=float(sequence.ours[offset]),
        theirs=float(sequence.theirs[offset]),
        before=sequence.token_ids[max(at - CONTEXT_TOKENS, 0) : at],
        after=sequence.token_ids[at + 1 : at + 1 + CONTEXT_TOKENS],
    )


def _by_position(
    sequences: Sequence[ScoredSequence], deltas: Sequence[Floats]
) -> tuple[PositionBin, ...]:
    at_N = np.concatenate(
        [s.first + np.arange(len(d)) for s, d in zip(sequences, deltas, strict=True)]
    )
    size_N = np.abs(np.concatenate(deltas))
    at_N, size_N = at_N[np.isfinite(size_N)], size_N[np.isfinite(size_N)]
    if not size_N.size:
        return ()
    start, stop = int(at_N.min()), int(at_N.max()) + 1
    width = -(-(stop - start) // NUM_BINS)
    bins = []
    for low in range(start, stop, width):
        inside = size_N[(at_N >= low) & (at_N < low + width)]
        if inside.size:
            high = min(low + width, stop)
            mean, largest = float(inside.mean()), float(inside.max())
            bins.append(PositionBin(low, high, int(inside.size), mean, largest))
    return tuple(bins)


def _histogram(size_N: Floats) -> Histogram:
    """Half decades from 1e-8 (and below) to the largest value."""
    top = float(size_N.max()) if size_N.size else 0.0
    last = max(int(np.ceil(2 * np.log10(top))) if top > 0 else -15, -15)
    edges = 10.0 ** (np.arange(-16, last + 1) / 2)
    edges[-1] = max(edges[-1], np.nextafter(top, np.inf))
    counts, _ = np.histogram(np.maximum(size_N, edges[0]), edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))
