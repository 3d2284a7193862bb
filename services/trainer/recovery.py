"""A run that lost its books goes on from those of its newest checkpoint.

What its files tell beyond them is no part of the run any more: it moves to `abandoned-NAME` beside
them, so that steps which are done again stand in the run's record once, as they were done.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import structlog

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.checkpoint_folder import complete_checkpoints, settle
from services.trainer.events import EVENTS_FILE
from services.trainer.metrics_file import METRICS_FILE

log = structlog.get_logger()


def recover_books(run_dir: Path) -> None:
    """Where the books are lost, take the newest checkpoint's: groups that were open there are fed
    again. Without a checkpoint the run begins anew."""
    place = run_dir / BOOKS_FILE
    if place.exists():
        return
    settle(run_dir)
    last_seq = last_step = 0
    for step, folder in reversed(complete_checkpoints(run_dir)):
        if (folder / BOOKS_FILE).exists():
            scratch = place.with_suffix(".building")
            shutil.copyfile(folder / BOOKS_FILE, scratch)
            with closing(Books(scratch)) as books:
                last_seq, last_step = books.last_seq(), books.last_step()
            _rewind(run_dir, last_seq=last_seq, last_step=last_step)
            scratch.rename(place)
            log.warning("books_recovered", step=step, checkpoint=str(folder))
            return
    _rewind(run_dir, last_seq=0, last_step=0)


def _rewind(run_dir: Path, *, last_seq: int, last_step: int) -> None:
    """Leave in the run's files what the books have, and what other services told."""
    _abandon(run_dir / EVENTS_FILE, lambda line: line.get("seq", 0) > last_seq)
    _abandon(run_dir / METRICS_FILE, lambda line: line["step"] > last_step)


def _abandon(path: Path, is_beyond: Callable[[dict[str, Any]], bool]) -> None:
    """Move those whole lines of a JSONL file out of it. Half a line, of a crash, is dropped."""
    if not path.exists():
        return
    kept: list[bytes] = []
    abandoned: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            (abandoned if is_beyond(json.loads(line)) else kept).append(line)
    if not abandoned:
        return
    with path.with_name(f"abandoned-{path.name}").open("ab") as file:
        file.writelines(abandoned)
    scratch = path.with_suffix(".building")
    scratch.write_bytes(b"".join(kept))
    scratch.rename(path)
    log.warning("lines_abandoned", path=str(path), num_lines=len(abandoned))
