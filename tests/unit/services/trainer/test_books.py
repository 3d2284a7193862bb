import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.entries import BooksViolated, Draw, DroppedGroups, EvalRecord
from shared.messages import Event


def event(name: str = "group_dropped", **fields: object) -> Event:
    return Event(
        name=name, job_id="j", service="trainer", replica="t", at_s=1.0, fields=dict(fields)
    )


@pytest.fixture
def books(tmp_path: Path):
    books = Books(tmp_path / BOOKS_FILE)
    yield books
    books.close()


def open_groups(books: Books, number: int) -> list[str]:
    first = books.next_draw()
    ids = [f"g{draw}" for draw in range(first, first + number)]
    books.record_draws([Draw(draw, f"g{draw}", 0) for draw in range(first, first + number)])
    return ids


def commit(books: Books, step: int, ids: list[str]) -> None:
    books.commit_batch(
        step, body=b"batch %d" % step, group_ids=ids, policy_version=step, batch_facts={"n": 1}
    )


def drop(books: Books, group_id: str, reason: str = "no_variance") -> None:
    books.drop_group(group_id, reason=reason, event=event(group_id=group_id), rewards=[1.0, 1.0])


def test_every_drawn_group_is_counted_once(books: Books) -> None:
    ids = open_groups(books, 5)
    books.record_draws([Draw(5, "g5", 0, "too_long", event("prompt_skipped"))])
    drop(books, ids[0])
    commit(books, 1, ids[1:3])
    counts = books.counts()
    assert counts == {
        "open": 2,
        "trained": 2,
        "dropped": 1,
        "skipped": 1,
        "dropped:no_variance": 1,
        "skipped:too_long": 1,
    }
    assert counts["open"] + counts["trained"] + counts["dropped"] + counts["skipped"] == 6
    assert books.next_draw() == 6


def test_draws_have_no_gap(books: Books) -> None:
    open_groups(books, 1)
    for draws in ([2], [1, 3], [0, 1]):
        with pytest.raises(BooksViolated, match="do not start at 1"):
            books.record_draws([Draw(draw, f"new{draw}", 0) for draw in draws])
    assert books.num_open() == 1


def test_rewards_of_dropped_groups_belong_to_the_step_that_was_collected(books: Books) -> None:
    ids = open_groups(books, 4)
    drop(books, ids[0])
    commit(books, 1, ids[1:2])
    drop(books, ids[2])
    books.drop_group(ids[3], reason="surplus", event=event())
    assert books.dropped_during(1) == DroppedGroups(1, 2.0, 2)
    assert books.dropped_during(2) == DroppedGroups(1, 2.0, 2)
    assert books.dropped_during(3) == DroppedGroups(0, 0.0, 0)


def test_kept_surplus_of_a_step_does_not_count_against_the_next(books: Books) -> None:
    ids = open_groups(books, 3)
    commit(books, 1, ids[:1])
    books.drop_group(ids[1], reason="surplus", event=event(), rewards=(1.0, 0.0))
    drop(books, ids[2])
    assert books.dropped_during(2).num_groups == 2  # its rewards are reported
    assert books.num_unusable_during(2) == 1
    assert "surplus" not in books.reasons_during(2)


def test_trained_group_cannot_be_trained_again(books: Books) -> None:
    ids = open_groups(books, 3)
    commit(books, 1, ids[:2])
    with pytest.raises(BooksViolated, match="g1 cannot be trained by step 2"):
        commit(books, 2, [ids[2], ids[1]])
    assert books.last_step() == 1
    assert [group.group_id for group in books.open_groups()] == ["g2"]
    assert books.redo_steps(0) == [1]


@pytest.mark.parametrize("settled", ["trained", "dropped", "unknown"])
def test_settled_group_cannot_be_dropped(books: Books, settled: str) -> None:
    ids = open_groups(books, 1)
    if settled == "trained":
        commit(books, 1, ids)
    elif settled == "dropped":
        drop(books, ids[0])
    else:
        ids = ["stranger"]
    before = books.counts(), len(books.journal(0))
    with pytest.raises(BooksViolated, match="it is not open"):
        drop(books, ids[0])
    assert (books.counts(), len(books.journal(0))) == before


def test_steps_follow_each_other(books: Books) -> None:
    ids = open_groups(books, 2)
    with pytest.raises(BooksViolated, match="step 2 cannot follow step 0"):
        commit(books, 2, ids)
    assert books.num_open() == 2


def test_a_copy_keeps_nobody_waiting(tmp_path: Path, books: Books) -> None:
    """Not even a write that is under way: it is not in the copy."""
    commit(books, 1, open_groups(books, 1))
    with ThreadPoolExecutor(1) as threads, books._writing():
        books._note_event(event("later"))
        threads.submit(books.copy_to, tmp_path / "copy.sqlite").result(timeout=60)
    copied = Books(tmp_path / "copy.sqlite")
    assert copied.redo_body(1) == b"batch 1"
    assert copied.journal(0) == []
    copied.close()


def test_result_of_a_step_is_kept_once(books: Books) -> None:
    commit(books, 1, open_groups(books, 1))
    for loss in (1.0, 2.0):
        books.keep_result(1, {"loss": loss})
        books.tell_step(1, fields={"loss": loss, "wait": 0.1}, event=event("step", step=1))
    (step,) = books.steps()
    assert step.result == {"loss": 1.0}
    assert step.told == {"loss": 1.0, "wait": 0.1}
    assert [body["name"] for _, body in books.journal(0)] == ["step"]


def test_redo_log_names_missing_batches(books: Books) -> None:
    for step in (1, 2, 3):
        commit(books, step, open_groups(books, 1))
    books.trim_redo(1)
    assert books.redo_steps(1) == [2, 3]
    assert books.redo_body(2) == b"batch 2"
    with pytest.raises(BooksViolated, match=r"holds steps \[2, 3\], replay needs \[1, 2, 3\]"):
        books.redo_steps(0)


def test_refused_step_drops_its_groups(books: Books) -> None:
    first, second = open_groups(books, 2)
    books.commit_batch(
        1,
        body=b"",
        group_ids=[first, second],
        policy_version=1,
        batch_facts={},
        rewards={first: [1.0, 0.0], second: [0.5]},
    )
    assert books.dropped_during(1) == DroppedGroups(0, 0.0, 0)
    books.refuse_step(1, reason="bad_logprobs", events=[event()])
    assert books.dropped_during(1) == DroppedGroups(2, 1.5, 3)
    assert books.last_step() == 0
    assert books.redo_steps(0) == []
    assert books.counts()["dropped:bad_logprobs"] == 2
    commit(books, 1, open_groups(books, 1))
    books.keep_result(1, {})
    with pytest.raises(BooksViolated, match="cannot be refused any more"):
        books.refuse_step(1, reason="bad_logprobs", events=[])


def test_first_arrival_of_a_dropped_group_counts_and_later_ones_do_not(books: Books) -> None:
    early, late = open_groups(books, 2)
    drop(books, early)
    books.drop_group(late, reason="lost", event=event())
    assert not books.note_late(early, [1.0])
    assert books.note_late(late, [1.0, 0.5])
    assert not books.note_late(late, [1.0, 0.5])
    assert books.dropped_during(1) == DroppedGroups(2, 3.5, 4)
    assert books.reasons_during(1) == {"no_variance": 1}
    assert books.usable_share() == 1.0


def test_what_is_dropped_after_a_step_was_chosen_belongs_to_the_next(books: Books) -> None:
    ids = open_groups(books, 3)
    drop(books, ids[0])
    assert books.close_collection(1) == DroppedGroups(1, 2.0, 2)
    drop(books, ids[1])
    commit(books, 1, ids[2:])
    assert books.dropped_during(1) == DroppedGroups(1, 2.0, 2)
    assert books.dropped_during(2) == DroppedGroups(1, 2.0, 2)


def test_evaluation_is_closed_once(books: Books) -> None:
    record = EvalRecord("e0", 0, 0, "", 5.0, "open")
    books.open_eval(record)
    assert books.evals() == [record]
    held = EvalRecord("e0", 0, 0, "rollout-0", 9.0, "open")
    books.hold_eval(held, event("eval_requested"))
    assert books.evals() == [held]
    assert books.close_eval("e0", state="failed", event=event("eval_failed"))
    assert not books.close_eval("e0", state="finished")
    assert [record.state for record in books.evals()] == ["failed"]


def test_books_survive_the_process(tmp_path: Path) -> None:
    """The file is read by a new object while the first one was never closed: a kill."""
    killed = Books(tmp_path / BOOKS_FILE)
    ids = open_groups(killed, 2)
    commit(killed, 1, ids[:1])
    killed.keep_note("version_offset", "1")
    books = Books(tmp_path / BOOKS_FILE)
    assert books.group(ids[0]).step == 1
    assert books.redo_body(1) == b"batch 1"
    assert books.read_note("version_offset") == "1"
    assert books.next_draw() == 2
    books.close()
    killed.close()


@pytest.mark.parametrize("cut", range(1, 9))
def test_crash_inside_a_commit_leaves_all_or_nothing(tmp_path: Path, cut: int) -> None:
    """The connection fails at its `cut`-th statement of the transaction."""
    books = Books(tmp_path / BOOKS_FILE)
    ids = open_groups(books, 3)
    left = [cut]

    class Failing:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        @property
        def in_transaction(self) -> bool:
            return self._db.in_transaction

        def execute(self, *args: object) -> sqlite3.Cursor:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return self._db.execute(*args)

    real = books._db
    books._db = Failing(real)
    with contextlib.suppress(KeyboardInterrupt):
        commit(books, 1, ids)
    books._db = real
    counts = books.counts()
    outcomes = (counts["trained"], books.last_step(), books.redo_steps(0))
    assert outcomes in [(0, 0, []), (3, 1, [1])]
    assert counts["open"] + counts["trained"] == 3
    books.close()


def test_usable_share_is_that_of_the_newest_steps(books: Books) -> None:
    assert books.usable_share() == 1.0
    ids = open_groups(books, 12)
    drop(books, ids[0], "unscored_error")
    commit(books, 1, ids[1:3])
    for reason, name in zip(["no_variance_same", "too_old", "surplus"], ids[3:6], strict=True):
        drop(books, name, reason)
    commit(books, 2, ids[6:9])
    assert books.usable_share() == pytest.approx(5 / 7)
    assert books.usable_share(num_steps=1) == pytest.approx(3 / 4)
