"""Who pulls from whom: few from the trainer, nobody in a circle, the trainer always at last."""

import pytest

from services.trainer.fanout import Fanout

TRAINER = "http://trainer"


def url(number: int) -> str:
    return f"http://server-{number}"


def assign(fanout: Fanout, *numbers: int, as_changes: bool = False) -> list[list[str]]:
    return [fanout.sources(7, f"server-{n}", url(n), as_changes=as_changes) for n in numbers]


@pytest.mark.parametrize("max_sends", [1, 2, 5])
def test_the_trainer_is_asked_first_by_so_many_and_last_by_the_others(max_sends: int) -> None:
    found = assign(Fanout(TRAINER, max_sends=max_sends), *range(100))
    assert [sources[0] == TRAINER for sources in found] == [True] * max_sends + [False] * (
        100 - max_sends
    )
    assert all(sources[-1] == TRAINER for sources in found[max_sends:])
    for number, sources in enumerate(found):
        assert set(sources) <= {TRAINER, *map(url, range(number))}  # only who began before


def test_children_are_spread_over_those_that_have_fewest() -> None:
    found = assign(Fanout(TRAINER, max_sends=1), *range(64))
    parents = [sources[0] for sources in found[1:]]
    assert max(parents.count(parent) for parent in parents) <= 2


def test_changes_come_only_from_those_that_have_them() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    assign(fanout, 0)
    (first, second) = assign(fanout, 1, 2, as_changes=True)
    assert first == [TRAINER]
    assert second == [url(1), TRAINER]
    (whole,) = assign(fanout, 3)
    assert set(whole) == {url(0), url(1), url(2), TRAINER}


def test_a_server_that_failed_or_went_is_nobodys_source() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    assign(fanout, 0, 1, 2)
    fanout.note_failed(7, "server-0")
    fanout.forget_server("server-1")
    (found,) = assign(fanout, 3)
    assert found == [url(2), TRAINER]


def test_a_server_that_failed_asks_the_trainer_first_the_next_time() -> None:
    """Its only peer may be so slow that it never gets a shard whole."""
    fanout = Fanout(TRAINER, max_sends=1)
    assert assign(fanout, 0, 1)[1] == [url(0), TRAINER]
    fanout.note_failed(7, "server-1")
    assert assign(fanout, 1) == [[TRAINER, url(0)]]
    assert assign(fanout, 2)[0][0] != TRAINER  # nobody else does


def test_a_server_that_serves_another_version_has_this_one_no_more() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    assign(fanout, 0, 1)
    fanout.note_served(8, "server-0")
    fanout.note_served(7, "server-1")
    (found,) = assign(fanout, 2)
    assert found == [url(1), TRAINER]
    fanout.keep_only({8})
    assert assign(fanout, 3) == [[TRAINER]]


def test_owners_of_parts_stand_for_the_trainer() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    found = [
        fanout.sources(7, f"server-{n}", url(n), as_changes=False, has_owners=True)
        for n in range(3)
    ]
    assert found == [[], [url(0)], [url(1), url(0)]] or found == [[], [url(0)], [url(0), url(1)]]
