import random
from collections import deque

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
    assert Admission(16, max_lag).min_policy_version(num_ahead, progress(5)) == version
    assert Admission(16, max_lag).min_policy_version(num_ahead, progress(0)) == max(0, version - 5)


def test_unusable_groups_do_not_count_in_line() -> None:
    at = progress(5)
    at.usable_share = 0.65  # and a margin of 0.1
    admission = Admission(16, 1)
    assert [admission.min_policy_version(n, at) for n in (21, 22, 42, 43)] == [4, 5, 5, 6]


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
    line: deque[int] = deque()  # versions that sampled the groups in line
    while at.steps_left:
        while len(line) < admission.max_open(at):
            oldest = admission.min_policy_version(len(line), at)
            if oldest > at.published_version:
                break
            line.append(chance.randint(oldest, at.published_version))
            if chance.random() < drop_share:
                line.pop()  # without variance: its slot is free again
        for _ in range(groups_per_step):
            assert at.policy_version - line.popleft() <= max_lag
        at.step += 1
        at.policy_version = at.published_version = at.step
