"""Each known mistake, planted in one implementation, must be seen; and the walk must say where.

A check that does not see its mistake is worthless, so these tests test the tests. What caught which
mistake, and by how much, is printed after the run.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.walk import walk
from tests.parity import format_mutations as formats
from tests.parity.backward_mutations import BACKWARD_MUTATIONS
from tests.parity.conftest import Findings
from tests.parity.engines import (
    BOUND,
    CHUNKS,
    GRADIENT_BOUND,
    QUANTISED_BOUND,
    Case,
    States,
    Weights,
    actor,
    actor_logits,
    case,
    departure,
    reference_logits,
    sampler_logits,
    stored,
    stored_values,
    twin,
)
from tests.parity.format_mutations import FORMAT_MUTATIONS
from tests.parity.mutations import FAINT, MUTATIONS, SIDES, Side
from tests.parity.test_gradients import (
    SEEDS,
    actor_gradients,
    departure_in_norm,
    transformers_gradients,
)

pytestmark = pytest.mark.usefixtures("megatron")

MARGIN = 10  # of gradients, times their bound
Check = Callable[[Architecture, Weights, Tensor], Tensor]

ENGINES = {"reference": reference_logits, "actor": actor_logits, "sampler": sampler_logits}
CHECKS: dict[Side, dict[str, Check]] = {
    "reference": {"logits": reference_logits},
    "actor": {"logits": actor_logits},
    "sampler": {
        "logits": sampler_logits,
        "decoding": functools.partial(sampler_logits, chunks=CHUNKS),
    },
}
FORWARD = MUTATIONS | FAINT
PLANTED = [
    pytest.param(name, side, id=f"{side}-{name}")
    for name, mutation in FORWARD.items()
    for side in SIDES
    if side in mutation.plants
]


def known() -> Case:
    return case("small", rows=1, seed=11)


@functools.cache
def right_states(side: Side) -> States:
    """What the walk holds the wrong side against: another implementation, in order."""
    states: States = {}
    other = "actor" if side == "reference" else "reference"
    ENGINES[other](known().arch, known().weights, known().tokens, states=states)
    return states


@pytest.mark.parametrize("side", SIDES)
def test_checks_and_walk_pass_without_a_mistake(side: Side) -> None:
    given = known()
    for check in CHECKS[side].values():
        logits = check(given.arch, given.weights, given.tokens)
        assert departure(logits, given.logits) <= BOUND
    states: States = {}
    ENGINES[side](given.arch, given.weights, given.tokens, states=states)
    assert walk(states, right_states(side), given.arch).first is None


@pytest.mark.parametrize(("mistake", "side"), PLANTED)
def test_planted_mistake_is_caught_and_located(
    mistake: str, side: Side, findings: Findings
) -> None:
    mutation, given = FORWARD[mistake], known()
    right = right_states(side)
    states: States = {}
    with mutation.planted(side, given) as (arch, weights):
        seen = {
            name: departure(check(arch, weights, given.tokens), given.logits)
            for name, check in CHECKS[side].items()
        }
        ENGINES[side](arch, weights, given.tokens, states=states)
    caught = {name: size for name, size in seen.items() if size > mutation.margin * BOUND}
    found = walk(states, right, given.arch)
    findings.add(mistake, side, caught, found.verdict)
    assert caught, f"no check saw it: {seen}"
    assert found.suspects[0] == mutation.at, found.verdict


# ------------------------------------------------------------------ number formats


@functools.cache
def rounding_reference() -> tuple[Tensor, States]:
    states: States = {}
    values = stored_values(stored(formats.ARCH, formats.values()))
    logits = reference_logits(
        formats.ARCH, values, formats.TOKENS, quant=formats.QUANT, states=states
    )
    return logits, states


def quantised_sampler(tensors: Weights, states: States) -> Tensor:
    return sampler_logits(
        formats.ARCH,
        tensors,
        formats.TOKENS,
        quant=formats.QUANT,
        dtype=torch.float64,
        states=states,
    )


def test_format_checks_and_walk_pass_without_a_mistake() -> None:
    assert formats.formats_depart() == 0
    logits, right = rounding_reference()
    states: States = {}
    ours = quantised_sampler(stored(formats.ARCH, formats.values()), states)
    assert (ours - logits).abs().max() <= QUANTISED_BOUND
    assert walk(states, right, formats.ARCH, tolerance=QUANTISED_BOUND).first is None


@pytest.mark.parametrize("mistake", FORMAT_MUTATIONS)
def test_wrong_format_in_the_sampler_is_caught_and_located(
    mistake: str, findings: Findings
) -> None:
    mutation = FORMAT_MUTATIONS[mistake]
    logits, right = rounding_reference()
    tensors, states = stored(formats.ARCH, formats.values()), States()
    with mutation.planted(mutation.in_sampler):
        if mutation.is_of_writer:
            tensors = stored(formats.ARCH, formats.values())
        ours = quantised_sampler(tensors, states)
    size = float((ours - logits).abs().max())
    found = walk(states, right, formats.ARCH, tolerance=QUANTISED_BOUND)
    findings.add(mistake, "sampler", {"float64 logits": size}, found.verdict)
    assert size > 1000 * QUANTISED_BOUND
    assert found.suspects == (mutation.at,), found.verdict


@pytest.mark.parametrize("mistake", FORMAT_MUTATIONS)
def test_wrong_format_on_both_sides_is_caught_by_the_twins(
    mistake: str, findings: Findings
) -> None:
    mutation = FORMAT_MUTATIONS[mistake]
    with mutation.planted(mutation.in_shared):
        size = formats.formats_depart()
    findings.add(mistake, "both", {"slow twins": size}, "both sides agree: nothing to walk")
    assert size > 1e-3


# ------------------------------------------------------------------ backward passes


def smooth() -> Case:
    """No value lies at the clamp, where gradients jump."""
    return case("small", rows=1, seed=SEEDS["small"])


@functools.cache
def right_gradients() -> dict[str, Tensor]:
    model = twin(smooth().arch, smooth().weights)
    (model(smooth().tokens).logits * cotangent()).sum().backward()
    return transformers_gradients(model, smooth().arch)


def cotangent() -> Tensor:
    return torch.randn(smooth().logits.shape, generator=torch.Generator().manual_seed(8))


def worst_gradient() -> tuple[float, str]:
    """Of the actor, against transformers: the largest relative error and the tensor that has it."""
    model = actor(smooth().arch, smooth().weights)
    (model(smooth().tokens) * cotangent()).sum().backward()
    ours, theirs = actor_gradients(model), right_gradients()
    return max(
        (departure_in_norm(ours[name], theirs[name]), name) for name in theirs if theirs[name].any()
    )


def test_gradient_check_passes_without_a_mistake() -> None:
    assert worst_gradient()[0] <= GRADIENT_BOUND


@pytest.mark.parametrize("mistake", BACKWARD_MUTATIONS)
def test_wrong_backward_pass_is_caught(mistake: str, findings: Findings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        BACKWARD_MUTATIONS[mistake](patch)
        logits = actor_logits(smooth().arch, smooth().weights, smooth().tokens)
        size, name = worst_gradient()
    assert departure(logits, smooth().logits) <= BOUND, "the forward pass is right"
    findings.add(mistake, "actor", {"gradients": size}, f"worst gradient: {name}")
    assert size > MARGIN * GRADIENT_BOUND
