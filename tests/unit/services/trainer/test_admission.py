import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.admission import Admission, Progress


def progress(step: int = 0, num_steps: int = 100) -> Progress:
    return Progress(num_steps, step=step, policy_version=step, published_version=step)


@pytest.mark.parametrize(
    ("max_lag", "oversampling", "steps_left", "slots"),
    [(0, 1.0, 9, 16), (0, 1.25, 9, 20), (2, 1.0, 9, 48), (2, 1.0, 2, 32), (3, 1.1, 1, 18)],
)
def test_slots(max_lag: int, oversampling: float, steps_left: int, slots: int) -> None:
    admission = Admission(16, max_lag, oversampling)
    assert admission.max_open(progress(100 - steps_left)) == slots


@pytest.mark.parametrize(
    ("max_lag", "num_ahead", "version"),
    [
        *[(0, 0, 5), (0, 15, 5), (0, 19, 5), (1, 0, 4), (1, 15, 4), (1, 16, 5), (1, 31, 5)],
        *[(1, 32, 6), (4, 0, 1), (4, 40, 3)],
    ],
)
def test_oldest_version_that_may_sample_a_group(max_lag: int, num_ahead: int, version: int) -> None:
    admission = Admission(16, max_lag)
    for step, expected in ((5, version), (0, max(0, version - 5))):
        assert drawn(admission, num_ahead + 1, progress(step))[-1] == expected


def drawn(admission: Admission, number: int, at: Progress, *, num_kept: int = 0) -> list[int]:
    """Oldest versions of so many groups that are drawn one after the other."""
    versions: list[int] = []
    for _ in range(number):
        versions.append(admission.min_policy_version(num_kept, Counter(versions), at))
    return versions


def test_some_of_the_groups_that_are_out_are_expected_to_be_unusable() -> None:
    at = progress(5)
    at.usable_share = 0.65  # and a margin of 0.1
    versions = drawn(Admission(16, 1), 44, at)
    assert [versions[n] for n in (21, 22, 42, 43)] == [4, 5, 5, 6]


def test_what_is_here_counts_whole() -> None:
    at = progress(5)
    at.usable_share = 0.4
    assert drawn(Admission(16, 1), 5, at, num_kept=14) == [4, 4, 4, 4, 5]


def test_what_was_unusable_is_replaced_for_the_same_step() -> None:
    """By the version that is served, though the line is full of groups for the step after it."""
    at, admission = progress(5), Admission(16, 1)
    out = Counter({4: 3, 5: 16})
    assert admission.min_policy_version(13, out, at) == 6
    out[4] -= 2  # they came, and could not be used
    assert admission.min_policy_version(13, out, at) == 4


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    drop_share=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 10_000),
)
def test_groups_trained_in_line_are_never_too_old(
    max_lag: int, groups_per_step: int, drop_share: float, seed: int
) -> None:
    """Whatever the servers' delays: each group is sampled by some version it was admitted for."""
    chance = random.Random(seed)
    admission = Admission(groups_per_step, max_lag)
    at = progress(0, num_steps=30)
    kept: list[int] = []  # versions that sampled what is here
    out: Counter[int] = Counter()
    while at.steps_left:
        while len(kept) < groups_per_step or chance.random() < 0.5:
            while len(kept) + out.total() < admission.max_open(at):
                oldest = admission.min_policy_version(len(kept), out, at)
                if oldest > at.published_version:
                    break
                out[oldest] += 1
            if not (waiting := +out):
                break
            out[oldest := min(waiting)] -= 1  # in line, as the stream gives them
            if chance.random() >= drop_share:  # else without variance: its slot is free again
                kept.append(chance.randint(oldest, at.published_version))
        kept.sort()  # the oldest are trained first
        for _ in range(groups_per_step):
            assert at.policy_version - kept.pop(0) <= max_lag
        at.step += 1
        at.policy_version = at.published_version = at.step


@settings(max_examples=100, deadline=None)
@given(
    max_lag=st.integers(1, 4),
    groups_per_step=st.integers(1, 5),
    oversampling=st.sampled_from([1.0, 1.5, 3.0]),
    drop_share=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 10_000),
)
def test_a_step_that_lacks_groups_is_given_some_in_whatever_order_they_come(
    max_lag: int, groups_per_step: int, oversampling: float, drop_share: float, seed: int
) -> None:
    """Some are sampled long before they come, by servers behind; some come again after a loss; the
    process may die, and what it held counts as out until it has come again."""
    chance = random.Random(seed)
    admission = Admission(groups_per_step, max_lag, oversampling)
    at = progress(0, num_steps=20)
    kept: list[tuple[int, int]] = []  # version that sampled it, and oldest one it was drawn for
    out: list[tuple[int, int]] = []
    while at.steps_left:
        at.usable_share = chance.random()
        kept = [one for one in kept if one[0] >= admission.oldest_trainable(at)]
        while len(kept) < groups_per_step:
            while len(kept) + len(out) < admission.max_open(at):
                oldest = admission.min_policy_version(
                    len(kept), Counter(drawn_for for _, drawn_for in out), at
                )
                if oldest > at.published_version:
                    break
                out.append((chance.randint(oldest, at.published_version), oldest))
            assert out, "the step waits, and nothing is drawn for it"
            came = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.1:  # lost: asked again, of a server that is no further back
                out.append((chance.randint(came[0], at.published_version), came[1]))
            elif came[0] >= admission.oldest_trainable(at) and chance.random() >= drop_share:
                kept.append(came)
            if chance.random() < 0.02:
                out, kept = out + kept, []
        kept.sort()
        taken, kept = kept[:groups_per_step], kept[groups_per_step:]
        assert all(at.policy_version - version <= max_lag for version, _ in taken)
        at.step += 1
        at.policy_version += 1
        at.published_version = at.policy_version - chance.randint(0, 1)


@pytest.mark.parametrize("max_lag", [8, 64])
def test_a_draw_costs_no_more_than_it_has_versions_to_look_at(max_lag: int) -> None:
    """With 256 groups a step and all slots taken, however many groups that is."""
    looked_at = 0

    class Counted(Counter[int]):
        def get(self, version: int, default: int = 0) -> int:  # type: ignore[override]
            nonlocal looked_at
            looked_at += 1
            return super().get(version, default)

    at, admission = progress(100), Admission(256, max_lag)
    out = Counted({100 - max_lag + ahead: 256 for ahead in range(max_lag + 1)})
    assert admission.min_policy_version(0, out, at) == 101
    assert looked_at == max_lag + 1
