import msgpack
import numpy as np
import pytest

from services.trainer.batches import (
    KeptGroup,
    Unusable,
    batch_facts,
    build_batch,
    judge,
)
from shared.job import Job
from shared.messages import (
    GraderError,
    Outcome,
    PromptGroup,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    Timeout,
    Unparseable,
    VersionSpan,
)

RIGHT, WRONG = Score(value=1.0), Score(value=0.0)


def make_job(**sections: dict) -> Job:
    document = {
        "name": "test",
        "steps": 4,
        "model": {"rollout_checkpoint": "/nowhere"},
        "data": {"path": "/nowhere"},
        "sampling": {"context_length": 64, "max_response_tokens": 8},
    }
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields
    return Job.model_validate(document)


def scored(
    *outcomes: Outcome, draw: int = 0, version: int = 3, lengths: tuple = (), finish: str = "stop"
) -> ScoredGroup:
    prompt = PromptGroup(
        job_id="j",
        group_id=f"j.g{draw:06d}",
        draw=draw,
        prompt_token_ids=[1, 2, 3],
        gold="1",
        grader="math",
        num_samples=len(outcomes),
        sampling=SamplingParams(max_response_tokens=8),
        seed=1,
        min_policy_version=0,
    )
    rollouts = []
    for index in range(len(outcomes)):
        length = lengths[index] if lengths else 2
        spans = [VersionSpan(policy_version=version, num_tokens=length)] if length else []
        rollouts.append(
            Rollout(
                rollout_id=f"{prompt.group_id}.{index}",
                response_token_ids=[7] * length,
                logprobs=[-0.5] * length,
                version_spans=spans,
                finish_reason=finish,
                text="",
            )
        )
    group = RolloutGroup(
        prompt=prompt, replica="r", rollouts=rollouts, sampled_at_s=0.0, sampling_s=0.0
    )
    return ScoredGroup(group=group, outcomes=list(outcomes), grading_s=0.0)


def kept(*rewards: float, draw: int = 0, **traits) -> KeptGroup:
    outcomes = [Score(value=reward) for reward in rewards]
    return KeptGroup(b"1-0", scored(*outcomes, draw=draw, **traits), rewards)


def test_group_with_variance_gives_its_rewards() -> None:
    assert judge(scored(RIGHT, WRONG), job=make_job(), oldest_trainable=3) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("group", "reason", "rewards"),
    [
        (scored(RIGHT, RIGHT), "no_variance_all_right", (1.0, 1.0)),
        (scored(WRONG, WRONG), "no_variance_all_wrong", (0.0, 0.0)),
        (scored(*[Score(value=0.3)] * 2), "no_variance_same", (0.3, 0.3)),
        (scored(Score(value=0.1 + 0.2), Score(value=0.3)), "no_variance_same", (0.1 + 0.2, 0.3)),
        (
            scored(Score(value=-3e5), Score(value=-3e5 * (1 + 2**-37))),
            "no_variance_all_wrong",
            (-3e5, -3e5 * (1 + 2**-37)),
        ),
        (scored(RIGHT, Unparseable()), "unscored_unparseable", (1.0,)),
        (scored(RIGHT, Unparseable(), Timeout(after_s=1)), "unscored_timeout", (1.0,)),
        (scored(Timeout(after_s=1), GraderError(reason="x")), "unscored_error", ()),
        (scored(RIGHT, WRONG, version=2), "too_old", (1.0, 0.0)),
        (scored(RIGHT, WRONG, lengths=(0, 0)), "empty_responses", (1.0, 0.0)),
        (scored(RIGHT, WRONG, finish="abort"), "aborted", (1.0, 0.0)),
        (scored(WRONG, WRONG, finish="length"), "all_truncated", (0.0, 0.0)),
    ],
)
def test_unusable_group_says_why(group: ScoredGroup, reason: str, rewards: tuple) -> None:
    assert judge(group, job=make_job(), oldest_trainable=3) == Unusable(reason, rewards)


def test_unparseable_text_may_earn_nothing_instead() -> None:
    job = make_job(reward={"unscored": {"unparseable": "zero"}})
    assert judge(scored(RIGHT, Unparseable()), job=job, oldest_trainable=0) == (1.0, 0.0)
    late = judge(scored(RIGHT, Timeout(after_s=1)), job=job, oldest_trainable=0)
    assert late == Unusable("unscored_timeout", (1.0,))
    wrong = judge(scored(WRONG, Unparseable()), job=job, oldest_trainable=0)
    assert wrong == Unusable("no_variance_all_wrong", (0.0, 0.0))  # both count in reward_raw


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Unparseable(), "unparseable"),
        (Timeout(after_s=1), "timeout"),
        (GraderError(reason="x"), "error"),
    ],
)
def test_each_outcome_without_a_score_has_its_own_setting(outcome: Outcome, kind: str) -> None:
    others = [Unparseable(), Timeout(after_s=1), GraderError(reason="x")]
    zero = make_job(reward={"unscored": {kind: "zero"}})
    assert judge(scored(RIGHT, outcome), job=zero, oldest_trainable=0) == (1.0, 0.0)
    for other in others:
        if other.kind != kind:
            found = judge(scored(RIGHT, outcome, other), job=zero, oldest_trainable=0)
            assert found == Unusable(f"unscored_{other.kind}", (1.0, 0.0))
    all_zero = {other.kind: "zero" for other in others}
    job = make_job(reward={"unscored": all_zero})
    assert judge(scored(RIGHT, *others), job=job, oldest_trainable=0) == (1.0, 0.0, 0.0, 0.0)


def test_raw_reward_counts_unparseable_text_that_earns_nothing() -> None:
    group = scored(RIGHT, Unparseable())
    kept_group = KeptGroup(b"1-0", group, (1.0, 0.0))
    batch = build_batch([kept_group], job=make_job(), job_id="j", step=1, policy_version=3)
    facts = batch_facts(batch, [kept_group], reward_sum=0.0, num_rewards=2)
    assert facts["reward_raw"] == pytest.approx(0.25)


def test_groups_without_variance_are_kept_if_the_job_says_so() -> None:
    job = make_job(sampling={"dynamic": False})
    assert judge(scored(RIGHT, RIGHT), job=job, oldest_trainable=0) == (1.0, 1.0)


def test_batch_stands_in_draw_order() -> None:
    groups = [kept(0.0, 1.0, draw=5), kept(1.0, 0.0, draw=2), kept(0.0, 1.0, draw=3)]
    batch = build_batch(groups, job=make_job(), job_id="j", step=4, policy_version=3)
    assert batch.group_ids == ["j.g000002", "j.g000003", "j.g000005"]
    assert [sample.rollout_id for sample in batch.samples][:2] == ["j.g000002.0", "j.g000002.1"]
    assert [sample.advantage for sample in batch.samples] == [1, -1, -1, 1, -1, 1]
    first = batch.samples[0]
    assert (first.num_prompt_tokens, first.token_ids.tolist()) == (3, [1, 2, 3, 7, 7])
    assert (
        batch.pack()
        == build_batch(groups[::-1], job=make_job(), job_id="j", step=4, policy_version=3).pack()
    )


def test_a_batch_has_the_sampled_ids_whatever_their_text_is() -> None:
    """No text goes back to ids: two ids may read as one token's text, and stay two."""
    group = kept(0.0, 1.0)
    whole = group.scored.group
    rollouts = [one.model_copy(update={"text": "another text"}) for one in whole.rollouts]
    other = group.scored.model_copy(
        update={"group": whole.model_copy(update={"rollouts": rollouts})}
    )
    batches = [
        build_batch(
            [KeptGroup(b"1-0", scored_group, group.rewards)],
            job=make_job(),
            job_id="j",
            step=1,
            policy_version=3,
        )
        for scored_group in (group.scored, other)
    ]
    assert batches[0].pack() == batches[1].pack()
    sample = batches[0].samples[0]
    assert sample.token_ids[sample.num_prompt_tokens :].tolist() == [7, 7]
    assert len(sample.sampler_logprobs) == 2  # of every id, the stop token's included


def test_empty_responses_are_left_out_of_the_batch_and_counted() -> None:
    groups = [kept(0.0, 1.0, lengths=(0, 2))]
    batch = build_batch(groups, job=make_job(), job_id="j", step=1, policy_version=3)
    assert [sample.rollout_id for sample in batch.samples] == ["j.g000000.1"]
    facts = batch_facts(batch, groups, reward_sum=0.0, num_rewards=0)
    assert (facts["samples"], facts["empty_responses"]) == (1, 1)


def test_truncated_responses_may_be_left_out_but_count_in_the_baseline() -> None:
    job = make_job(algorithm={"truncated": "leave_out"})
    group = kept(0.0, 1.0, 1.0, 0.0)
    whole = group.scored.group
    cut = whole.rollouts[3].model_copy(update={"finish_reason": "length"})
    rollouts = [*whole.rollouts[:3], cut]
    scored_group = group.scored.model_copy(
        update={"group": whole.model_copy(update={"rollouts": rollouts})}
    )
    group = KeptGroup(b"1-0", scored_group, group.rewards)
    batch = build_batch([group], job=job, job_id="j", step=1, policy_version=3)
    assert [sample.advantage for sample in batch.samples] == [-1.0, 1.0, 1.0]
    cut_all = scored(RIGHT, WRONG, finish="length")
    verdict = judge(cut_all, job=job, oldest_trainable=0)
    assert verdict == Unusable("all_truncated", (1.0, 0.0))


def shaped(*parts: tuple[float, float]) -> list[Score]:
    """What each answer is worth, and what length or format add to it."""
    return [Score(value=worth + added, unshaped=worth) for worth, added in parts]


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        (shaped((0.0, 0.0), (0.0, -0.5)), "no_variance_all_wrong"),
        (shaped((1.0, 0.0), (1.0, -0.5)), "no_variance_all_right"),
        (shaped((0.1 + 0.2, 0.1), (0.3, -0.5)), "no_variance_same"),  # float noise apart
        (shaped((1.0, -1.0), (0.0, 0.0)), "no_variance_same"),  # nothing is left of the difference
        (shaped((1.0, -0.5), (0.0, 0.0)), None),
    ],
)
def test_groups_are_kept_for_what_is_right_not_for_its_length(
    outcomes: list[Score], reason: str | None
) -> None:
    """DAPO, arXiv 2503.14476, eq. 11, counts equivalent answers; eq. 13 comes after."""
    rewards = tuple(outcome.value for outcome in outcomes)
    arrived = ScoredGroup.unpack(scored(*outcomes).pack())
    found = judge(arrived, job=make_job(), oldest_trainable=0)
    assert found == (rewards if reason is None else Unusable(reason, rewards))
    static = make_job(sampling={"dynamic": False})
    assert judge(arrived, job=static, oldest_trainable=0) == rewards


def test_an_unscored_answer_that_earns_nothing_is_a_wrong_one() -> None:
    job = make_job(reward={"unscored": {"unparseable": "zero"}})
    group = scored(*shaped((0.0, -0.5)), Unparseable())
    found = judge(group, job=job, oldest_trainable=0)
    assert found == Unusable("no_variance_all_wrong", (-0.5, 0.0))


def test_messages_of_before_are_read_as_unshaped() -> None:
    body = msgpack.unpackb(scored(RIGHT, Score(value=0.75)).pack())
    for outcome in body["outcomes"]:
        del outcome["unshaped"]
    found = judge(ScoredGroup.unpack(msgpack.packb(body)), job=make_job(), oldest_trainable=0)
    assert found == (1.0, 0.75)


def test_all_truncated_responses_with_different_rewards_are_trained() -> None:
    cut = scored(RIGHT, WRONG, finish="length")
    assert judge(cut, job=make_job(), oldest_trainable=0) == (1.0, 0.0)


def test_statistics_of_the_batch_are_over_the_tokens_that_train() -> None:
    """Rewards 1, 0 of three tokens each; neither a long response that is left out nor a token
    without a log-probability counts."""
    job = make_job(
        algorithm={"name": "reinforce_plus_plus", "truncated": "leave_out"},
        sampling={"samples_per_prompt": 1, "dynamic": False},
    )
    groups = [
        kept(1.0, draw=0, lengths=(3,)),
        kept(0.0, draw=1, lengths=(5,)),
        kept(0.0, draw=2, lengths=(8,), finish="length"),
    ]
    (bad,) = groups[1].scored.group.rollouts
    bad.logprobs[:2] = np.nan
    batch = build_batch(groups, job=job, job_id="j", step=1, policy_version=3)
    assert [sample.advantage for sample in batch.samples] == [1.0, -1.0]


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_group_without_a_token_to_train_never_passes(dynamic: bool) -> None:
    """Only empty responses, whatever they earn; or the others are truncated and left out."""
    job = make_job(sampling={"dynamic": dynamic}, algorithm={"truncated": "leave_out"})
    empty = scored(RIGHT, WRONG, lengths=(0, 0))
    assert judge(empty, job=job, oldest_trainable=0) == Unusable("empty_responses", (1.0, 0.0))
    cut = scored(RIGHT, WRONG, lengths=(0, 8), finish="length")
    rollouts = [cut.group.rollouts[0].model_copy(update={"finish_reason": "stop"})]
    whole = cut.group.model_copy(update={"rollouts": rollouts + cut.group.rollouts[1:]})
    mixed = cut.model_copy(update={"group": whole})
    assert judge(mixed, job=job, oldest_trainable=0) == Unusable("all_truncated", (1.0, 0.0))
    train_all = make_job(sampling={"dynamic": dynamic})
    assert judge(mixed, job=train_all, oldest_trainable=0) == (1.0, 0.0)


def test_raw_reward_counts_dropped_groups_and_trained_reward_does_not() -> None:
    groups = [kept(0.0, 1.0, draw=0), kept(1.0, 1.0, draw=1, version=1, finish="length")]
    batch = build_batch(groups, job=make_job(), job_id="j", step=1, policy_version=3)
    facts = batch_facts(batch, groups, reward_sum=1.0, num_rewards=6)
    assert facts["reward_raw"] == pytest.approx(0.4)
    assert facts["reward_trained"] == pytest.approx(0.75)
    assert (facts["lag_mean"], facts["lag_max"]) == (1.0, 2)
    assert facts["truncated_share"] == 0.5
    assert (facts["tokens"], facts["response_tokens"]) == (20, 8)
