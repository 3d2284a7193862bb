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


def test_changes_come_first_from_those_that_have_them() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    (first, second) = assign(fanout, 0, 1, as_changes=True)
    assert first == [TRAINER]
    assert second == [url(0), TRAINER]
    (whole,) = assign(fanout, 2)
    assert set(whole[:-1]) == {url(0), url(1)}
    assert whole[-1] == TRAINER
    (third,) = assign(fanout, 3, as_changes=True)
    assert third[2:] == [url(2), TRAINER]


@pytest.mark.parametrize("max_sends", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_changes_and_whole_shards_have_one_count(max_sends: int, first: bool) -> None:
    """A shard may have no changes, or refused ones: then both kinds of server pull it whole."""
    fanout = Fanout(TRAINER, max_sends=max_sends)
    found = assign(fanout, *range(4), as_changes=first)
    found += assign(fanout, *range(4, 8), as_changes=not first)
    assert sum(sources[0] == TRAINER for sources in found) == max_sends
    assert all(TRAINER in sources for sources in found)


def test_a_server_that_starts_again_is_sent_nothing_twice() -> None:
    fanout = Fanout(TRAINER, max_sends=1)
    assign(fanout, 0, 1)
    for _ in range(5):
        fanout.forget_server("server-0")
        assert assign(fanout, 0) == [[url(1), TRAINER]]


def test_a_server_alone_is_sent_the_version_each_time_it_starts() -> None:
    """Nobody else has it; the count is used up all the same."""
    fanout = Fanout(TRAINER, max_sends=1)
    for _ in range(3):
        assert assign(fanout, 0) == [[TRAINER]]
        fanout.forget_server("server-0")
    assert assign(fanout, 0, 1) == [[TRAINER], [url(0), TRAINER]]


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
