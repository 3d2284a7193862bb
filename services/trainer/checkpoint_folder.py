"""Names of a checkpoint's folder, on which the conductor and its ranks agree; no torch here.

.stepN.job        what the conductor adds: a copy of the books as they are at step N
.stepN.building   what the ranks write; last they move the above in and hash all files
stepN             the same folder, complete
"""

import shutil
from pathlib import Path

import structlog

from services.trainer.books import BOOKS_FILE, Books

log = structlog.get_logger()
CHECKPOINTS = "checkpoints"
COMPLETE_FILE = "complete.json"


def building_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.building")


def job_state_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.job")


def complete_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Step and folder, oldest first; half-written ones are none."""
    found = sorted((run_dir / CHECKPOINTS).glob(f"step*/{COMPLETE_FILE}"))
    return [(int(path.parent.name.removeprefix("step")), path.parent) for path in found]


def add_books(books: Books, path: Path) -> None:
    """Have the checkpoint that is written to `path` contain what stands in the books now: which
    prompts were drawn, which groups are open, which versions and steps there were."""
    folder = job_state_of(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    books.copy_to(folder / BOOKS_FILE)


def recover_books(run_dir: Path) -> None:
    """Where the books of a run are lost, have those of its newest checkpoint: the run then goes on
    from there, and groups that were open are fed again."""
    place = run_dir / BOOKS_FILE
    if place.exists():
        return
    for step, folder in reversed(complete_checkpoints(run_dir)):
        if (folder / BOOKS_FILE).exists():
            scratch = place.with_suffix(".building")
            shutil.copyfile(folder / BOOKS_FILE, scratch)
            scratch.rename(place)
            log.warning("books_recovered", step=step, checkpoint=str(folder))
            return
