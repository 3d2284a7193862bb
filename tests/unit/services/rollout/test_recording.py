"""The choices that an engine records: at every token those under which the next one was sampled.

Activations are unrounded: sums of a whole pass are in another order, and a rounded code that flips
with it may change a choice.
"""

import numpy as np
import pytest
import torch

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.routes import Recording
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import LoadedVersion, build_version
from services.rollout.models.deepseek_v4 import Choices, Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from shared.messages import SamplingParams
from shared.models.deepseek_v4.checkpoint import quantise_tensor
from shared.quant.activation import UNQUANTISED
from shared.quant.policy import POLICIES
from shared.routes import (
    first_selecting_token,
    num_entry_bytes,
    pack_bits,
    pack_routes,
    unpack_routes,
)
from tests.tiny_deepseek_v4 import DEMO, random_weights

ARCH = DEMO.with_format("fp8")
PROMPT = list(range(10, 33))
RESPONSE = 20
BOTH = Recording(experts=True, entries=True)


@pytest.fixture(scope="module")
def versions() -> list[LoadedVersion]:
    """They have no tensor in common, so their choices differ everywhere."""
    torch.set_num_threads(1)
    return [built(version) for version in range(4)]


def built(version: int) -> LoadedVersion:
    stored = {}
    for name, values in random_weights(ARCH, seed=version).items():
        stored |= quantise_tensor(name, values, policy=POLICIES["fp8"])
    return build_version(version, ARCH, stored)


def new_scheduler(version: LoadedVersion, recording: Recording = BOTH, **limits: int) -> Scheduler:
    sizes = {"max_running": 16, "max_tokens": 64} | limits
    scheduler = Scheduler(Sampler(ARCH, UNQUANTISED), limits=Limits(**sizes), recording=recording)
    scheduler.switch(version, "in_place")
    return scheduler


def request(*, samples: list[int], **fields) -> GroupRequest:
    sampling = SamplingParams(max_response_tokens=RESPONSE)
    prompt = np.array(PROMPT, np.int32)
    return GroupRequest("g", prompt, samples, sampling, seed=5, with_routes=True, **fields)


def run(scheduler: Scheduler) -> list[Completion]:
    done: dict[str, list[Completion]] = {}
    while scheduler.has_work:
        done |= dict(scheduler.step())
    return done["g"]


def chosen(version: LoadedVersion, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What one pass over a whole sequence chooses: expert ids, and the bits of kept entries."""
    cache, choices = Cache(ARCH, num_slots=1, max_tokens=64), Choices()
    step = cache.prefill_step([Run(0, 0, tokens)])
    Sampler(ARCH, UNQUANTISED).hidden(version.derived, cache, step, choices=choices)
    num = len(tokens)
    experts = torch.stack(choices.experts, 1)[:num].numpy()
    kept = torch.stack(choices.entries, 1)[:num].numpy()
    kept[: first_selecting_token(ARCH)] = False
    return experts, pack_bits(kept, num_entry_bytes(num))


def inputs(completion: Completion) -> np.ndarray:
    return np.concatenate((PROMPT, completion.token_ids))[:-1]


def check(completion: Completion, versions: list[LoadedVersion]) -> None:
    """Row i is what the version that sampled token i + 1 chooses; prompts are of the first one."""
    routes, tokens = completion.routes, inputs(completion)
    assert routes is not None
    assert routes.expert_ids is not None
    assert routes.entry_bits is not None
    spans = [version for version, num in completion.version_spans for _ in range(num)]
    used = np.array([spans[0]] * (len(PROMPT) - 1) + spans)
    assert len(used) == routes.num_tokens == len(tokens)
    for version in set(spans):
        experts, bits = chosen(versions[version], tokens)
        at = used == version
        assert np.array_equal(routes.expert_ids[at], experts[at])
        assert np.array_equal(routes.entry_bits[at], bits[at])
    asked = {"routing": True, "indexer": True, "of": "g.0"}
    unpack_routes(pack_routes(routes), ARCH, len(tokens), **asked)  # and they can be replayed


@pytest.mark.parametrize(
    "limits",
    [{}, {"chunk_tokens": 5}, {"max_running": 2}, {"max_running": 1, "batch_tokens": 7}],
    ids=["at once", "prompt in chunks", "few slots", "one slot"],
)
def test_decoding_records_what_a_whole_pass_chooses(versions, limits: dict[str, int]) -> None:
    scheduler = new_scheduler(versions[0], **limits)
    scheduler.add(request(samples=list(range(5))))
    completions = run(scheduler)
    assert len({one.token_ids.tobytes() for one in completions}) == 5
    for one in completions:
        check(one, versions)


@pytest.mark.parametrize("modes", [["in_place"], ["retract"], ["in_place", "retract", "in_place"]])
def test_new_weights_in_mid_generation_leave_what_was_recorded(versions, modes) -> None:
    scheduler = new_scheduler(versions[0], max_running=3, chunk_tokens=8)
    scheduler.add(request(samples=list(range(5))))
    for version, mode in enumerate(modes, start=1):
        for _ in range(7):
            scheduler.step()
        assert scheduler.switch(versions[version], mode) == []
    completions = run(scheduler)
    assert max(len(one.version_spans) for one in completions) == len(modes) + 1
    for one in completions:
        check(one, versions)


def test_an_aborted_completion_takes_its_routes_along(versions) -> None:
    scheduler = new_scheduler(versions[0], max_running=2)
    scheduler.add(request(samples=[0, 1, 2]))
    for _ in range(6):
        scheduler.step()
    ((_, cut),) = scheduler.switch(versions[1], "abort")
    assert [len(one.token_ids) for one in cut] == [7, 7, 0]
    carried = [Completion.from_payload(one.to_payload()) for one in cut]
    resumed = new_scheduler(versions[1])  # another engine, as after a restart
    resumed.add(request(samples=[0, 1, 2], partial=dict(enumerate(carried))))
    completions = run(resumed)
    assert [len(one.version_spans) for one in completions] == [2, 2, 1]
    for one in completions:
        check(one, versions)


def test_a_partial_completion_without_its_routes_is_refused(versions) -> None:
    partial = Completion(np.array([5], np.int32), -np.ones(1, np.float32), [(0, 1)], "abort")
    scheduler = new_scheduler(versions[0])
    with pytest.raises(ValueError, match="sample 0 brings routes of 0 tokens, not 23"):
        scheduler.add(request(samples=[0], partial={0: partial}))


@pytest.mark.parametrize(
    ("recording", "experts", "entries"),
    [(Recording(), False, False), (Recording(experts=True), True, False)],
)
def test_nothing_is_kept_that_is_not_asked_for(versions, recording, experts, entries) -> None:
    scheduler = new_scheduler(versions[0], recording)
    scheduler.add(request(samples=[0]))
    (one,) = run(scheduler)
    routes = one.routes
    assert (routes is not None) == (experts or entries)
    if routes is not None:
        assert (routes.expert_ids is not None) == experts
        assert (routes.entry_bits is not None) == entries


def test_recording_changes_no_completion(versions) -> None:
    found = []
    for recording in (BOTH, Recording()):
        scheduler = new_scheduler(versions[0], recording)
        scheduler.add(request(samples=[0, 1]))
        found.append(run(scheduler))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
