import time

import pytest

from services.rollout.starts import Starts


def test_each_try_waits_longer_and_the_last_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    starts = Starts(first_wait_s=5.0, most=3)
    for wait_s in (5.0, 10.0):
        assert starts.may_try("a")
        starts.note_failed("no such file")
        now_s += wait_s - 0.1
        assert not starts.may_try("a")
        now_s += 0.2
    assert starts.describe() == "the engine did not start in 2 of 3 tries so far: no such file"
    assert starts.may_try("a")
    starts.note_failed("no such file")
    now_s += 1e6
    assert starts.gave_up
    assert not starts.may_try("a")
    assert "3 of 3 tries and is not tried again" in starts.describe()
    assert starts.may_try("b")  # another job begins anew
    assert not starts.gave_up
