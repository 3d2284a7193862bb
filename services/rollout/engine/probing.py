"""A version's probe: fixed tokens, scored by the engine and by the trainer.

    trainer   t(anchor) ──────── T ───────> t(new)     what the weights moved
    engine    s(anchor) ──────── S ───────> s(new)     what the engine moved

The scores must lie within the probe's bound of the trainer's, and the engine must have moved as
the trainer did. |S - T| is the noise of two implementations, or state that is left of older
weights. Noise was there when the anchor was proven, the first version with these tokens; a part
that stays behind adds up against it, however small each step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import WeightsCorrupt
from shared.weights.protocol import Probe, ProbeSequence

NOISE_FACTOR = 8.0  # times the anchor's own median departure from the trainer
OUTLIERS = 0.9  # of the anchor's departures: rounding that flips a code moves what follows it
LEAST_NOISE = 2e-5  # two honest implementations in FP32
LEAST_SHARE = 0.01  # of what the trainer's scores have moved: rounding moves with the weights


@dataclass(frozen=True, slots=True)
class Proven:
    """What one version's probe came to, sequence by sequence; compared tokens alone."""

    policy_version: int
    probe: Probe
    scores: list[np.ndarray]  # all that the engine gave, FP32 of tokens 1..
    mean_abs_delta: float  # from the trainer

    def is_of(self, probe: Probe) -> bool:
        """Whether the tokens are the same."""
        return [_tokens(one) for one in self.probe.sequences] == [
            _tokens(one) for one in probe.sequences
        ]


def prove(
    policy_version: int,
    probe: Probe,
    scores: Sequence[np.ndarray],
    *,
    anchor: Proven | None,
) -> Proven:
    """The probe of a candidate, proven; WeightsCorrupt says by how much it fails.

    `scores` are the engine's FP32 log-probabilities of tokens 1.. of each sequence.
    """
    departures = _departures(probe, scores)
    delta = float(np.abs(np.concatenate(departures)).mean()) if departures else 0.0
    if not math.isfinite(delta) or delta > probe.max_mean_abs_delta:
        bound = probe.max_mean_abs_delta
        raise WeightsCorrupt(f"probe: mean |delta log p| {delta:.4g} exceeds {bound:g}")
    if anchor is not None and anchor.is_of(probe):
        _check_followed(probe, departures, anchor)
    return Proven(policy_version, probe, list(scores), delta)


def next_anchor(anchor: Proven | None, proven: Proven | None) -> Proven | None:
    """What later versions are compared with, now that `proven` is served."""
    if proven is None or not proven.probe.sequences:
        return anchor
    return anchor if anchor is not None and anchor.is_of(proven.probe) else proven


def _check_followed(probe: Probe, departures: list[np.ndarray], anchor: Proven) -> None:
    """WeightsCorrupt when the engine moved otherwise than the trainer, in every sequence.

    By the median token: an expert that is chosen otherwise at a near tie moves a few tokens far,
    and in one sequence; state that stays behind moves all tokens of all sequences.
    """
    noise = _departures(anchor.probe, anchor.scores)
    followed = _departures(anchor.probe, [np.array(one.logprobs) for one in probe.sequences])
    allowed = max(
        LEAST_NOISE,
        NOISE_FACTOR * max(map(_median_abs, noise)),
        float(np.quantile(np.abs(np.concatenate(noise)), OUTLIERS)),
        LEAST_SHARE * max(map(_median_abs, followed)),
    )
    moved = [new - old for new, old in zip(departures, noise, strict=True)]
    least = min(map(_median_abs, moved))
    if least > allowed:
        raise WeightsCorrupt(
            f"probe: since version {anchor.policy_version} the engine did not move as the trainer "
            f"did: the median token of each sequence is off by {least:.3g} or more, allowed is "
            f"{allowed:.3g}; something is left of older weights"
        )


def _departures(probe: Probe, scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Engine minus trainer, FP64, of the compared tokens of each sequence."""
    if len(scores) != len(probe.sequences):
        raise ValueError(f"{len(scores)} score arrays came for {len(probe.sequences)} sequences")
    return [
        _departure(sequence, found) for sequence, found in zip(probe.sequences, scores, strict=True)
    ]


def _departure(sequence: ProbeSequence, found: np.ndarray) -> np.ndarray:
    expected = np.array(sequence.logprobs, np.float64)
    if expected.shape != found.shape:
        raise ValueError(f"the probe has {len(expected)} log-probabilities for {len(found)} tokens")
    return (found - expected)[sequence.num_context_tokens - 1 :]


def _tokens(sequence: ProbeSequence) -> tuple[list[int], int]:
    return sequence.token_ids, sequence.num_context_tokens


def _median_abs(values: np.ndarray) -> float:
    return float(np.median(np.abs(values)))
