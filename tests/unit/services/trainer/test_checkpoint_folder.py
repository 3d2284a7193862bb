"""A checkpoint has the job's state too, and a run that lost its books goes on with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.checkpoint_folder import (
    CHECKPOINTS,
    COMPLETE_FILE,
    add_books,
    job_state_of,
)
from services.trainer.entries import Draw
from services.trainer.events import EVENTS_FILE, EventLog, event_maker
from services.trainer.metrics_file import METRICS_FILE, MetricsFile
from services.trainer.recovery import recover_books


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 1 and 2 are saved; at 1 group d1 is open, at 2 also d2. Step 3 is half written."""
    books = Books(tmp_path / BOOKS_FILE)
    books.record_draws([Draw(draw, f"d{draw}", 0) for draw in range(2)])
    for step in (1, 2, 3):
        books.commit_batch(
            step,
            body=b"batch",
            group_ids=[f"d{step - 1}"],
            policy_version=step,
            batch_facts={},
        )
        books.record_draws([Draw(step + 1, f"d{step + 1}", step)])
        path = tmp_path / CHECKPOINTS / f"step{step:08d}"
        add_books(books, path)
        if step < 3:
            complete(path, step)
    books.close()
    return tmp_path


def complete(path: Path, step: int) -> None:
    """As the ranks do."""
    path.mkdir()
    (job_state_of(path) / BOOKS_FILE).rename(path / BOOKS_FILE)
    (path / COMPLETE_FILE).write_text(f'{{"step": {step}, "policy_version": {step}}}')


def test_lost_books_are_those_of_the_newest_complete_checkpoint(run_dir: Path) -> None:
    (run_dir / BOOKS_FILE).unlink()
    recover_books(run_dir)
    books = Books(run_dir / BOOKS_FILE)
    assert books.last_step() == 2
    assert books.steps(2)[0].policy_version == 2
    assert books.next_draw() == 4
    assert [group.group_id for group in books.open_groups()] == ["d2", "d3"]
    assert books.redo_steps(2) == []
    books.close()
    assert not list(run_dir.glob("*.building"))


def test_books_that_are_there_stay(run_dir: Path) -> None:
    before = (run_dir / BOOKS_FILE).read_bytes()
    recover_books(run_dir)
    assert (run_dir / BOOKS_FILE).read_bytes() == before


def test_a_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    recover_books(tmp_path)
    assert not list(tmp_path.iterdir())


def told(path: Path, step: int) -> None:
    """One step's event, in books and files; each run of a step is told apart by its loss."""
    books = Books(path / BOOKS_FILE)
    record = EventLog(path, books)
    record.note(event_maker("job", "t")("step", step=step, loss=float(len(list(path.iterdir())))))
    MetricsFile(path, books).flush()
    record.close()
    books.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_are_done_again_stand_in_the_record_once(tmp_path: Path, saved: bool) -> None:
    """Steps 1 to 3 are told, 1 is saved, the books are lost, and step 2 is done again. Without a
    checkpoint it is step 1."""
    told(tmp_path, 1)
    if saved:
        books = Books(tmp_path / BOOKS_FILE)
        books.commit_batch(1, body=b"", group_ids=[], policy_version=1, batch_facts={})
        add_books(books, path := tmp_path / CHECKPOINTS / "step00000001")
        complete(path, 1)
        books.close()
    told(tmp_path, 2)
    told(tmp_path, 3)
    first = lines(tmp_path / METRICS_FILE)
    for path in tmp_path.glob(f"{BOOKS_FILE}*"):
        path.unlink()
    recover_books(tmp_path)
    kept = int(saved)
    told(tmp_path, kept + 1)
    for name in (METRICS_FILE, EVENTS_FILE):
        assert len(lines(tmp_path / name)) == kept + 1
        assert len(lines(tmp_path / f"abandoned-{name}")) == 3 - kept
    metrics = lines(tmp_path / METRICS_FILE)
    assert metrics[:kept] == first[:kept]
    assert [line["step"] for line in metrics] == list(range(1, kept + 2))
    assert metrics[-1]["loss"] != first[kept]["loss"]
