"""Continuous batching: what a completion is must not depend on what runs beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import build_version
from services.rollout.models.deepseek_v4 import Sampler
from shared.errors import Retryable
from shared.messages import SamplingParams
from shared.models.deepseek_v4.checkpoint import quantise_tensor
from shared.quant.activation import RELEASE
from shared.quant.policy import POLICIES
from tests.tiny_deepseek_v4 import DEMO, random_weights

ARCH = DEMO.with_format("fp8")


@pytest.fixture(scope="module")
def version():
    torch.set_num_threads(1)
    stored = {}
    for name, values in random_weights(ARCH, seed=0).items():
        stored |= quantise_tensor(name, values, policy=POLICIES["fp8"])
    return build_version(0, ARCH, stored)


def new_scheduler(version, *, max_running: int = 16, chunk_tokens: int = 256) -> Scheduler:
    limits = Limits(max_running=max_running, max_tokens=64, chunk_tokens=chunk_tokens)
    scheduler = Scheduler(Sampler(ARCH, RELEASE), limits=limits)
    scheduler.switch(version, "in_place")
    return scheduler


def request(name: str, prompt: list[int], *, samples: list[int], **fields) -> GroupRequest:
    sampling = {"max_response_tokens": 12, "stop_token_ids": [1, 2, 3, 4]} | fields
    return GroupRequest(
        name, np.array(prompt, np.int32), samples, SamplingParams(**sampling), seed=len(prompt)
    )


def run(scheduler: Scheduler) -> dict[str, list[Completion]]:
    done: dict[str, list[Completion]] = {}
    while scheduler.has_work:
        done |= dict(scheduler.step())
    return done


def assert_same(found: Completion, expected: Completion) -> None:
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.logprobs, expected.logprobs)
    assert found.finish_reason == expected.finish_reason


def test_a_completion_is_the_same_alone_and_among_forty_others(version) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 320, int(rng.integers(1, 40))).tolist() for _ in range(14)]
    crowd = new_scheduler(version, max_running=40)
    for number, prompt in enumerate(prompts):
        crowd.add(request(f"g{number}", prompt, samples=[0, 1, 2]))
    together = run(crowd)
    assert len({one.token_ids.tobytes() for group in together.values() for one in group}) == 42
    alone = new_scheduler(version, max_running=8)
    for number, prompt in enumerate(prompts):
        alone.add(request("one", prompt, samples=[2]))
        assert_same(run(alone)["one"][0], together[f"g{number}"][2])


def test_more_samples_than_slots_and_prompts_longer_than_a_chunk(version) -> None:
    prompt = list(range(10, 47))
    few = new_scheduler(version, max_running=3)
    few.add(request("g", prompt, samples=list(range(10))))
    many = new_scheduler(version, max_running=16)
    many.add(request("g", prompt, samples=list(range(10))))
    expected = run(many)["g"]
    for found, wanted in zip(run(few)["g"], expected, strict=True):
        assert_same(found, wanted)
    chunked = new_scheduler(version, chunk_tokens=16)
    chunked.add(request("g", prompt, samples=[0]))
    # Another chunking may round differently; the distribution it samples from is the same.
    assert run(chunked)["g"][0].logprobs[0] == pytest.approx(expected[0].logprobs[0], abs=0.05)


def test_a_score_repeats_the_recorded_logprobs(version) -> None:
    scheduler = new_scheduler(version)
    prompt = [9, 8, 7]
    scheduler.add(request("g", prompt, samples=[0, 1], temperature=0.8, stop_token_ids=[]))
    for one in run(scheduler)["g"]:
        ids = np.concatenate((prompt, one.token_ids))
        (scores,) = scheduler.score([ids], 0.8, version=version)
        assert scores[2:] == pytest.approx(one.logprobs, abs=1e-5)


def test_endings(version) -> None:
    scheduler = new_scheduler(version)
    everything = list(range(320))
    scheduler.add(request("stop", [9], samples=[0], stop_token_ids=everything))
    scheduler.add(request("length", [9], samples=[0], stop_token_ids=[], max_response_tokens=5))
    scheduler.add(request("context", [9] * 60, samples=[0], stop_token_ids=[]))
    done = run(scheduler)
    endings = {name: (one.finish_reason, len(one.token_ids)) for name, (one,) in done.items()}
    assert endings == {"stop": ("stop", 1), "length": ("length", 5), "context": ("length", 4)}
    assert all(
        sum(n for _, n in one.version_spans) == len(one.token_ids) for (one,) in done.values()
    )


def test_abort_ends_running_and_waiting_samples(version) -> None:
    scheduler = new_scheduler(version, max_running=2)
    scheduler.add(request("g", [9, 9], samples=[0, 1, 2], stop_token_ids=[]))
    scheduler.add(request("other", [8], samples=[0]))
    for _ in range(4):
        scheduler.step()
    cut = scheduler.abort("g")
    assert cut is not None
    assert [(one.finish_reason, len(one.token_ids)) for one in cut] == [
        ("abort", 5),
        ("abort", 5),
        ("abort", 0),
    ]
    assert scheduler.abort("g") is None
    assert list(run(scheduler)) == ["other"]
    assert scheduler.num_running == scheduler.num_waiting == 0
    scheduler.add(request("g", [9, 9], samples=[0, 1, 2], stop_token_ids=[]))
    assert len(run(scheduler)["g"][2].token_ids) == 12  # nothing of the engine was lost


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "prompt has 0 tokens, allowed are 1 to 63"),
        ([5] * 64, "prompt has 64 tokens, allowed are 1 to 63"),
        ([5, 320], "token id 320 is outside the vocabulary of 320"),
        ([-1], "token id -1 is outside the vocabulary of 320"),
    ],
)
def test_bad_prompts_are_refused_with_value_and_bound(version, prompt, text) -> None:
    scheduler = new_scheduler(version)
    with pytest.raises(ValueError, match=text):
        scheduler.add(request("g", prompt, samples=[0]))
    assert not scheduler.has_work


def test_another_version_than_the_one_held_is_refused(version) -> None:
    scheduler = new_scheduler(version)
    wanted = request("g", [5], samples=[0])
    wanted = GroupRequest(
        "g", wanted.prompt_token_ids, [0], wanted.sampling, seed=0, policy_version=4
    )
    with pytest.raises(Retryable, match="policy version 4 is not held; version 0 is"):
        scheduler.add(wanted)


def test_a_group_ends_once_enough_of_its_samples_are_complete(version) -> None:
    """Those that are complete are what they would be otherwise; the rest frees its slots."""
    whole = run_one(version, list(range(6)), enough=None)
    lengths = sorted(len(one.token_ids) for one in whole)
    assert lengths[2] < lengths[-1], "the samples must end at different times"
    found = run_one(version, list(range(6)), enough=3)
    complete = [i for i, one in enumerate(found) if one.finish_reason != "abort"]
    assert 3 <= len(complete) < 6
    for index in complete:
        assert_same(found[index], whole[index])
    assert max(len(found[index].token_ids) for index in complete) < lengths[-1]


def run_one(version, samples: list[int], *, enough: int | None) -> list[Completion]:
    scheduler = new_scheduler(version)
    stops = list(range(1, 40))
    asked = request("a", [7, 8, 9], samples=samples, max_response_tokens=40, stop_token_ids=stops)
    scheduler.add(replace(asked, enough=enough))
    (completions,) = run(scheduler).values()
    assert scheduler.num_running == 0
    return completions


@pytest.mark.parametrize("max_running", [16, 3])
def test_the_samples_of_a_group_share_one_computation_of_their_prompt(
    version, monkeypatch: pytest.MonkeyPatch, max_running: int
) -> None:
    """Three prompts of 37, 20 and 3 tokens, four samples each, also where slots are few: 60 tokens
    are computed as prompts."""
    scheduler = new_scheduler(version, max_running=max_running, chunk_tokens=16)
    computed: list[int] = []
    prefill_step = scheduler._cache.prefill_step

    def counted(runs):  # type: ignore[no-untyped-def]
        computed.extend(len(run.token_ids) for run in runs)
        return prefill_step(runs)

    monkeypatch.setattr(scheduler._cache, "prefill_step", counted)
    sizes = (37, 20, 3)
    for size in sizes:
        scheduler.add(request(f"g{size}", list(range(10, 10 + size)), samples=list(range(4))))
    done = run(scheduler)
    assert [len(done[f"g{size}"]) for size in sizes] == [4, 4, 4]
    assert sum(computed) == sum(sizes)
    computed.clear()
    scheduler.add(request("again", list(range(10, 47)), samples=list(range(4))))
    run(scheduler)
    assert sum(computed) == 37  # groups share nothing with each other: versions may differ
