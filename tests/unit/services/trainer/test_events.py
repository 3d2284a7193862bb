import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.entries import Draw
from services.trainer.events import (
    EVENTS_FILE,
    TRIM_EVERY,
    EventLog,
    EventTail,
    event_maker,
    follow_events,
)
from services.trainer.load import LoadMeter
from services.trainer.run_environment import keep_environment
from shared import topology
from shared.messages import Event
from shared.streams import publish

make = event_maker("j", "trainer-0")


@pytest.fixture
def books(tmp_path: Path):
    books = Books(tmp_path / BOOKS_FILE)
    yield books
    books.close()


def names(run_dir: Path) -> list[str]:
    return [json.loads(line)["name"] for line in (run_dir / EVENTS_FILE).read_text().splitlines()]


def test_own_and_foreign_events_stand_in_one_order(tmp_path: Path, books: Books) -> None:
    record = EventLog(tmp_path, books)
    record.note(make("first"))
    record.take(b"5-0", make("second"))
    books.record_draws([Draw(0, "g0", 0, "too_long", make("third"))])
    record.flush_journal()
    record.close()
    assert names(tmp_path) == ["first", "second", "third"]
    again = EventLog(tmp_path, books)
    assert (again.num_lines, again.stream_id) == (3, b"5-0")
    again.close()
    assert names(tmp_path) == ["first", "second", "third"]


def test_events_of_a_killed_process_are_written_by_the_next(tmp_path: Path, books: Books) -> None:
    """The books had the event, the file only half of its line."""
    record = EventLog(tmp_path, books)
    record.note(make("kept"))
    record.close()
    books.note_event(make("torn"))
    books.note_event(make("lost"))
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"name": "to')
    EventLog(tmp_path, books).close()
    assert names(tmp_path) == ["kept", "torn", "lost"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path, books: Books) -> None:
    record = EventLog(tmp_path, books)
    record.take(b"1-0", make("x", a=float("nan"), b=[float("inf"), {"c": -float("inf")}], d=1.5))
    record.close()
    body = json.loads((tmp_path / EVENTS_FILE).read_text())
    assert body["fields"] == {"a": None, "b": [None, {"c": None}], "d": 1.5}


async def test_copied_events_leave_the_broker(redis: Redis, tmp_path: Path, books: Books) -> None:
    stream = topology.events("j")
    record, stop = EventLog(tmp_path, books), asyncio.Event()

    async def on_event(event: Event) -> None:
        if event.name == "last":
            stop.set()

    bodies = [make("other").pack()] * (2 * TRIM_EVERY) + [make("last").pack()]
    for body in bodies:
        await publish(redis, stream, body)
    await asyncio.wait_for(follow_events(redis, "j", record, on_event, stop), 20)
    assert len(names(tmp_path)) == 2 * TRIM_EVERY + 1
    assert await redis.xlen(stream) <= 2
    stop.clear()
    await publish(redis, stream, make("last").pack())  # it goes on from where it was
    await asyncio.wait_for(follow_events(redis, "j", record, on_event, stop), 20)
    assert names(tmp_path)[-2:] == ["last", "last"]
    record.close()


def test_tail_gives_complete_lines_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    tail = EventTail(path, after=1)
    assert tail.read_more() == []
    path.write_text("one\ntwo\nthr")
    assert tail.read_more() == [(2, "two")]
    with path.open("a") as file:
        file.write("ee\nfour\nfive\n")
    assert tail.read_more(max_lines=2) == [(3, "three"), (4, "four")]
    assert tail.read_more() == [(5, "five")]
    assert tail.num_lines == 5


FOREIGN: list[tuple[dict[str, Any], str | None]] = [
    ({"name": "x", "fields": {"b": b"\xff"}}, "bytes is not JSON serializable"),
    ({"name": "environment", "fields": {"b": b"\xff"}}, "bytes is not JSON serializable"),
    ({"name": "x", "fields": [1]}, "Event.fields"),
    ({"name": "environment", "replica": "r" * 300, "fields": {"a": 1}}, None),
    ({"name": "group_sampled", "fields": {"tokens": "many"}}, None),
    ({"name": "group_sampled", "fields": {"tokens": math.nan}}, None),
    ({"name": "group_graded", "fields": {"outcomes": [1]}}, None),
    ({"name": "group_graded", "fields": {"outcomes": {"score": math.inf, "error": "x"}}}, None),
    ({"name": "eval_finished", "fields": {"eval_id": [1]}}, None),
]


@pytest.mark.parametrize(("told", "problem"), FOREIGN)
async def test_what_others_tell_ends_no_job(
    redis: Redis, tmp_path: Path, books: Books, told: dict[str, Any], problem: str | None
) -> None:
    """It would come again to the next process, for ever."""
    record, stop, load = EventLog(tmp_path, books), asyncio.Event(), LoadMeter()
    plain = {"job_id": "j", "service": "s", "replica": "r", "at_s": 1.0, "fields": {}}
    last = {"name": "group_sampled", "fields": {"tokens": 3}}
    stream = topology.events("j")
    for one in (told, last):
        await publish(redis, stream, msgpack.packb(plain | one))

    async def on_event(event: Event) -> None:
        load.note(event)
        await keep_environment(tmp_path, event)
        if event.fields == last["fields"]:
            stop.set()

    await asyncio.wait_for(follow_events(redis, "j", record, on_event, stop), 60)
    record.close()
    first, second = map(json.loads, (tmp_path / EVENTS_FILE).read_text().splitlines())
    assert second["name"] == "group_sampled"
    assert first["name"] == ("event_unreadable" if problem else told["name"])
    assert (problem or "") in first["fields"].get("error", "")
    assert set(load.take()["sampled_tokens_per_s"]) == {"r"}
