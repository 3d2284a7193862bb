"""The window of samples for people: which are kept, for how long, and token by token."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from services.trainer.batches import KeptGroup, build_batch
from services.trainer.load import LoadMeter
from services.trainer.shown_samples import KEPT_STEPS, SampleShelf, shown_samples, token_texts
from shared.job import Job
from shared.messages import (
    Event,
    PromptGroup,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
)

TOKENIZER = Tokenizer.from_file("assets/tiny-dsv4/tokenizer.json")
JOB = Job.model_validate(
    {
        "name": "test",
        "steps": 2,
        "model": {"rollout_checkpoint": "assets/tiny-dsv4"},
        "data": {"path": "rows.jsonl"},
        "sampling": {"context_length": 32, "max_response_tokens": 8},
    }
)


def kept(draw: int, num: int = 8) -> KeptGroup:
    group_id = f"test-1.g{draw:06d}"
    ids = np.array(TOKENIZER.encode("15;85").ids, np.int32)
    rollouts = [
        Rollout(
            rollout_id=f"{group_id}.{i}",
            response_token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            version_spans=[
                VersionSpan(policy_version=1, num_tokens=1),
                VersionSpan(policy_version=2, num_tokens=len(ids) - 1),
            ],
            finish_reason="stop",
            text="15;85",
        )
        for i in range(num)
    ]
    prompt = PromptGroup(
        job_id="test-1", group_id=group_id, draw=draw, prompt_token_ids=ids[:3], prompt_text="7+8=",
        gold="85", grader="arithmetic", num_samples=num, seed=0, min_policy_version=0,
        sampling=SamplingParams(max_response_tokens=8),
    )  # fmt: skip
    group = RolloutGroup(
        prompt=prompt, replica="rollout-0", rollouts=rollouts, sampled_at_s=0.0, sampling_s=1.0
    )
    outcomes = [Score(value=float(i % 2), extracted="85") for i in range(num)]
    rewards = tuple(one.value for one in outcomes)
    return KeptGroup(b"1-0", ScoredGroup(group=group, outcomes=outcomes, grading_s=0.1), rewards)


def test_a_group_and_the_furthest_samples_of_a_step_are_kept(tmp_path: Path) -> None:
    groups = [kept(draw) for draw in range(3)]
    batch = build_batch(groups, job=JOB, job_id="test-1", step=5, policy_version=3)
    length = len(batch.samples[0].sampler_logprobs)
    trained = np.full((24, length), -0.5, np.float32)
    trained[17, 0] = -2.5  # the furthest
    trained[20] = np.nan
    found = shown_samples(batch, groups, trained.tobytes(), TOKENIZER)
    assert [one.rollout_id for one in found[:8]] == [f"test-1.g000000.{i}" for i in range(8)]
    far = next(one for one in found if one.rollout_id == "test-1.g000002.1")
    assert (far.delta_max, far.versions, far.replica) == (2.0, [1, 2], "rollout-0")
    assert far.version_of_token == [1] + [2] * (length - 1)
    assert "".join(far.tokens) == "15;85"
    assert far.outcome == Score(value=1.0, extracted="85")

    shelf = SampleShelf(tmp_path)
    shelf.keep(5, found)
    assert shelf.get(far.rollout_id) == far
    assert shelf.heads(limit=1)[0]["rollout_id"] == far.rollout_id
    assert shelf.heads(step=4) == []
    shelf.keep(5 + KEPT_STEPS, found[:1])
    assert {head["rollout_id"] for head in shelf.heads()} == {found[0].rollout_id}
    assert shelf.get(far.rollout_id) is None  # out of the window
    shelf.close()


def test_an_answer_of_other_tokens_shows_nothing() -> None:
    groups = [kept(0)]
    batch = build_batch(groups, job=JOB, job_id="test-1", step=1, policy_version=0)
    assert shown_samples(batch, groups, b"", TOKENIZER) == []


def test_a_character_of_several_tokens_stands_at_its_last() -> None:
    tokenizer = Tokenizer.from_str(
        '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], '
        '"normalizer": null, "pre_tokenizer": null, "post_processor": null, '
        '"decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, '
        '"use_regex": false}, "model": {"type": "WordLevel", "unk_token": "a", '
        '"vocab": {"a": 0, "\\u00c3": 1, "\\u00a9": 2}}}'
    )
    assert token_texts([0, 1, 2, 0], tokenizer) == ["a", "", "é", "a"]


def test_load_is_counted_by_replica_since_the_last_step() -> None:
    meter = LoadMeter()
    event = Event(
        name="group_sampled", job_id="j", service="rollout", replica="r0", at_s=0.0,
        fields={"tokens": 100},
    )  # fmt: skip
    graded = event.model_copy(
        update={"name": "group_graded", "replica": "g0", "fields": {"outcomes": {"score": 8}}}
    )
    for one in (event, event, graded):
        meter.note(one)
    found = meter.take()
    assert found["sampled_tokens_per_s"]["r0"] > found["graded_per_s"]["g0"] > 0
    assert meter.take() == {"sampled_tokens_per_s": {}, "graded_per_s": {}}
