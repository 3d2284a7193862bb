"""A server that needs a restart again and again is given up; a few in weeks are nothing."""

import pytest

from services.rollout.engine.sglang import restarts as module
from services.rollout.engine.sglang.restarts import Restarts


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_five_within_an_hour_are_too_many(clock: Clock) -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.check()
        restarts.note()
        clock.now_s += 60
    with pytest.raises(RuntimeError, match="restarted 5 times within 3600 s"):
        restarts.check()


def test_those_of_weeks_are_not_added_up(clock: Clock) -> None:
    restarts = Restarts()
    for _ in range(20):
        restarts.note()
        clock.now_s += 1000
        restarts.check()
    assert restarts.total == 20


def test_a_proven_version_ends_the_count(clock: Clock) -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.note()
    restarts.forget()
    restarts.check()
