"""The probe's two rules, on made-up scores."""

import numpy as np
import pytest

from services.rollout.engine.probing import LEAST_NOISE, NOISE_FACTOR, Proven, next_anchor, prove
from shared.errors import WeightsCorrupt
from shared.weights.protocol import Probe, ProbeSequence

LENGTHS = (9, 30, 17)


def probe_of(trainer: list[np.ndarray], *, bound: float = 1.0, context: int = 3) -> Probe:
    sequences = [
        ProbeSequence(
            token_ids=list(range(len(one) + 1)),
            logprobs=one.tolist(),
            num_context_tokens=context,
        )
        for one in trainer
    ]
    return Probe(sequences=sequences, max_mean_abs_delta=bound)


def draws(seed: int, scale: float) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [scale * generator.normal(size=length - 1) for length in LENGTHS]


def added(*parts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.sum(one, axis=0) for one in zip(*parts, strict=True)]


def anchored(noise: float) -> tuple[Proven, list[np.ndarray]]:
    """The first version: engine and trainer differ by `noise`; and the trainer's scores."""
    trainer = draws(0, 1.0)
    found = added(trainer, draws(1, noise))
    return prove(3, probe_of(trainer), found, anchor=None), trainer


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.02])
def test_an_engine_that_moves_as_the_trainer_is_proven_however_far(noise: float) -> None:
    anchor, trainer = anchored(noise)
    for step in range(1, 20):
        moved = added(trainer, draws(50, 0.1 * step))
        found = added(moved, draws(100 + step, 2 * noise))
        proven = prove(3 + step, probe_of(moved), found, anchor=anchor)
        assert proven.mean_abs_delta == pytest.approx(1.6 * noise, rel=0.5, abs=1e-9)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.02])
def test_an_engine_that_moves_only_in_part_is_refused_once_that_outgrows_the_noise(
    noise: float,
) -> None:
    anchor, trainer = anchored(noise)
    move = draws(50, 1.0)
    allowed = max(LEAST_NOISE, NOISE_FACTOR * noise)
    for step, is_refused in ((0.1 * allowed, False), (60 * allowed, True)):
        moved = added(trainer, [step * one for one in move])
        behind = added(trainer, [0.8 * step * one for one in move], draws(7, noise))
        probe = probe_of(moved, bound=10.0)
        if is_refused:
            with pytest.raises(WeightsCorrupt, match="since version 3 the engine did not move"):
                prove(4, probe, behind, anchor=anchor)
        else:
            prove(4, probe, behind, anchor=anchor)
        prove(4, probe, behind, anchor=None)


def test_near_ties_in_all_sequences_but_one_are_no_stale_state() -> None:
    anchor, trainer = anchored(1e-7)
    found = added(trainer, draws(1, 1e-7))
    for one in found[:-1]:
        one += 0.02
    prove(4, probe_of(trainer), found, anchor=anchor)
    found[-1] += 0.02
    with pytest.raises(WeightsCorrupt):
        prove(4, probe_of(trainer), found, anchor=anchor)


def test_context_is_not_compared_and_the_mean_is_bounded() -> None:
    trainer = draws(0, 1.0)
    found = [one.copy() for one in trainer]
    for one in found:
        one[:2] += 100.0
    assert prove(0, probe_of(trainer, context=3), found, anchor=None).mean_abs_delta == 0
    with pytest.raises(WeightsCorrupt, match=r"mean \|delta log p\| .* exceeds 1"):
        prove(0, probe_of(trainer, context=2), found, anchor=None)
    found[1][5] = np.nan
    with pytest.raises(WeightsCorrupt, match=r"mean \|delta log p\| nan exceeds 1"):
        prove(0, probe_of(trainer, context=3), found, anchor=None)


def test_the_anchor_is_the_first_version_with_the_same_tokens() -> None:
    anchor, trainer = anchored(0.0)
    again = prove(4, probe_of(trainer), trainer, anchor=anchor)
    assert next_anchor(None, anchor) is anchor
    assert next_anchor(anchor, again) is anchor
    other = probe_of([one[:-1] for one in trainer])
    shorter = [one[:-1] + 0.5 for one in trainer]
    settled = prove(5, other, shorter, anchor=anchor)  # other tokens: nothing to compare with
    assert next_anchor(anchor, settled) is settled
    assert next_anchor(anchor, None) is anchor


def test_scores_of_another_length_are_a_callers_mistake() -> None:
    trainer = draws(0, 1.0)
    with pytest.raises(ValueError, match="2 score arrays came for 3"):
        prove(0, probe_of(trainer), trainer[:2], anchor=None)
    with pytest.raises(ValueError, match="8 log-probabilities for 7 tokens"):
        prove(0, probe_of(trainer), [trainer[0][:-1], *trainer[1:]], anchor=None)
