import threading
import time

import pytest

from shared.spans import Recorder, recorder, span


def test_nothing_is_kept_while_no_profile_is_taken() -> None:
    with span("a", "t") as facts:
        facts["more"] = 1
    recorder().note("b", "t", 0, 1)
    assert recorder().drain() == ([], 0)


def test_spans_carry_names_facts_and_times() -> None:
    own = recorder()
    own.start(10)
    try:
        begin_ns = time.monotonic_ns()
        with span("a", "t", group="g") as facts:
            facts["more"] = 1
        ((one,), dropped) = own.drain()
    finally:
        own.stop()
    assert (one.name, one.track, one.facts, dropped) == ("a", "t", {"group": "g", "more": 1}, 0)
    assert begin_ns <= one.begin_ns <= one.end_ns <= time.monotonic_ns()


def test_no_more_than_the_bound_are_kept_and_the_others_are_counted() -> None:
    own = Recorder()
    own.start(3)
    for at in range(5):
        own.note("a", "t", at, at + 1)
    spans, dropped = own.drain()
    assert ([one.begin_ns for one in spans], dropped) == ([0, 1, 2], 2)
    own.note("a", "t", 9, 10)  # the bound is of the whole profile, however often it is drained
    assert own.drain() == ([], 3)


def test_what_is_under_way_at_the_end_is_cut_there() -> None:
    own = Recorder()
    own.start(10)
    with own.measure("a", "t", {}):
        own.stop()
        ((one,), _) = own.drain()
    assert one.facts == {"cut": True}
    assert own.drain() == ([], 0)


def test_threads_lose_nothing() -> None:
    own = Recorder()
    own.start(10_000)

    def work() -> None:
        for _ in range(500):
            with own.measure("a", "t", {}):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(own.drain()[0]) == 2000


def test_an_error_in_the_block_ends_the_span() -> None:
    own = Recorder()
    own.start(10)
    with pytest.raises(ValueError, match="x"), own.measure("a", "t", {}):
        raise ValueError("x")
    assert len(own.drain()[0]) == 1
