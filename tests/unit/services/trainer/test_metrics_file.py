import json
import math
from pathlib import Path

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.events import event_maker
from services.trainer.metrics_file import METRICS_FILE, MetricsFile, numbers_of

MAKE = event_maker("j", "t")


def told(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def step(books: Books, number: int, **fields: object) -> None:
    books.note_event(MAKE("step", step=number, **fields))


def test_numbers_are_named_by_their_way_and_others_left_out() -> None:
    fields = {"a": 1, "b": {"c": 2.5, "d": "x"}, "e": math.nan, "f": True, "g": [1], "h": None}
    assert dict(numbers_of(fields)) == {"a": 1, "b.c": 2.5}


def test_each_step_is_one_line_though_it_is_told_twice_or_the_process_dies(tmp_path: Path) -> None:
    books = Books(tmp_path / BOOKS_FILE)
    metrics = MetricsFile(tmp_path, books)
    step(books, 1, reward_raw=0.5, seconds={"wait": 2.0})
    books.note_event(MAKE("group_dropped", group_id="g", reason="r"))
    metrics.flush()
    step(books, 1, reward_raw=0.5)
    metrics.flush()
    step(books, 2, reward_raw=0.75)  # and the process dies here
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "rew')
    MetricsFile(tmp_path, books)
    first, second = told(tmp_path)
    assert (first["step"], first["reward_raw"], first["seconds.wait"]) == (1, 0.5, 2.0)
    assert (second["step"], second["reward_raw"]) == (2, 0.75)
    assert first["at_s"] > 0
    books.close()
