"""Each known mistake, planted in one implementation, must be seen; and the walk must say where.

A check that does not see its mistake is worthless, so these tests test the tests. What caught which
mistake, and by how much, is printed after the run.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.walk import Walk, walk
from tests.parity import format_mutations as formats
from tests.parity.backward_mutations import BACKWARD_MUTATIONS
from tests.parity.conftest import Findings
from tests.parity.engines import (
    BOUND,
    CHUNKS,
    GRADIENT_BOUND,
    LENGTH,
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
    sampler_states_in_steps,
    stored,
    stored_values,
    twin,
)
from tests.parity.format_mutations import FORMAT_MUTATIONS
from tests.parity.mutations import (
    FAINT,
    MUTATIONS,
    SIDES,
    UNDERFLOW,
    UNSEEN_BELOW_TOPK,
    Planted,
    Side,
)
from tests.parity.state_mutations import STATE_MUTATIONS
from tests.parity.test_gradients import (
    SEEDS,
    actor_gradients,
    departure_in_norm,
    transformers_gradients,
)
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

MARGIN = 10  # times the bound of gradients, and of logits where a mutation has no own
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


@functools.cache
def below_topk() -> Case:
    """Every entry is kept: only its score says what the indexer makes of it."""
    arch = replace(known().arch, index_topk=LENGTH)
    with torch.no_grad():
        logits = twin(arch, known().weights)(known().tokens).logits
    return Case(arch, known().weights, known().tokens, logits)


@functools.cache
def wide_gates() -> Case:
    """Of some tokens every expert that the table names scores 0."""
    weights = random_weights(SMALL, seed=3)
    weights |= {n: 1000 * w for n, w in weights.items() if n.endswith("ffn.gate.weight")}
    tokens = random_tokens(SMALL, rows=1, length=64)
    with torch.no_grad():
        return Case(SMALL, weights, tokens, twin(SMALL, weights)(tokens).logits)


def walked(
    side: Side, given: Case, wrong: tuple[Architecture, Weights] | None = None
) -> tuple[Tensor, Walk]:
    """Logits and walk of `side`, built from `wrong`, against another implementation of the case."""
    right, states = States(), States()
    ENGINES["actor" if side == "reference" else "reference"](
        given.arch, given.weights, given.tokens, states=right
    )
    arch, weights = wrong or (given.arch, given.weights)
    logits = ENGINES[side](arch, weights, given.tokens, states=states)
    return logits, walk(states, right, given.arch)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mistake", UNSEEN_BELOW_TOPK)
def test_indexer_that_keeps_everything_is_located_by_its_scores(
    mistake: str, side: Side, findings: Findings
) -> None:
    mutation, given = MUTATIONS[mistake], below_topk()
    assert walked(side, given)[1].first is None
    with mutation.planted(side, given) as wrong:
        logits, found = walked(side, given, wrong)
    assert departure(logits, given.logits) <= BOUND, "nothing but the scores can show it"
    findings.add(
        f"{mistake}, all kept",
        side,
        {"scores": max(point.departure for point in found.points)},
        found.verdict,
    )
    assert found.suspects == (mutation.at,), found.verdict


@pytest.mark.parametrize("side", SIDES)
def test_division_by_scores_that_underflow_is_caught_and_located(
    side: Side, findings: Findings
) -> None:
    given = wide_gates()
    logits, found = walked(side, given)
    assert departure(logits, given.logits) <= BOUND
    assert found.first is None
    with UNDERFLOW.planted(side, given) as wrong:
        logits, found = walked(side, given, wrong)
    findings.add("0 / 0 where scores underflow", side, {"logits": math.inf}, found.verdict)
    assert not logits.isfinite().all()
    assert found.suspects == (UNDERFLOW.at,), found.verdict


# ------------------------------------------------------------------ state between steps


def test_steps_walk_as_one_prefill_without_a_mistake() -> None:
    given = known()
    logits, states = sampler_states_in_steps(given.arch, given.weights, given.tokens, CHUNKS)
    assert departure(logits, given.logits) <= BOUND
    assert walk(states, right_states("sampler"), given.arch).first is None


@pytest.mark.parametrize("mistake", STATE_MUTATIONS)
def test_wrong_state_between_steps_is_caught_and_located(mistake: str, findings: Findings) -> None:
    mutation, given, right = STATE_MUTATIONS[mistake], known(), right_states("sampler")
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(Planted({}, given.arch, patch))
        whole = sampler_logits(given.arch, given.weights, given.tokens)
        logits, states = sampler_states_in_steps(given.arch, given.weights, given.tokens, CHUNKS)
    size, found = departure(logits, given.logits), walk(states, right, given.arch)
    findings.add(mistake, "sampler", {"decoding": size}, found.verdict)
    assert departure(whole, given.logits) <= BOUND, "one prefill is right"
    assert size > MARGIN * BOUND
    assert found.suspects == (mutation.at,), found.verdict


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
