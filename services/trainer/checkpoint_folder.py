"""Names of a checkpoint's folder, on which the conductor and its ranks agree; no torch here.

.stepN.job        what the conductor adds: a copy of the books as they are at step N
.stepN.building   what the ranks write; last they move the above in and hash all files
stepN             the same folder, complete
.stepN.replaced   an older one of that step, until the new one has its name
"""

import shutil
from pathlib import Path

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.disk import writing

CHECKPOINTS = "checkpoints"
COMPLETE_FILE = "complete.json"


def building_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.building")


def job_state_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.job")


def put_in_place(path: Path) -> None:
    """Give what was built for `path` its name, which an older checkpoint may still have."""
    replaced = _replaced_of(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    building_of(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def give_up(path: Path) -> None:
    """Free the space of what was begun for `path`; a whole one that lacks only its name stays."""
    if not (building_of(path) / COMPLETE_FILE).exists():
        shutil.rmtree(building_of(path), ignore_errors=True)
    shutil.rmtree(job_state_of(path), ignore_errors=True)


def settle(run_dir: Path) -> None:
    """After a kill, while nobody writes: a complete folder gets its name, an older one that had to
    leave for one that never came has it again, and what is half-written goes."""
    checkpoints = run_dir / CHECKPOINTS
    for building in checkpoints.glob(f".step*.building/{COMPLETE_FILE}"):
        put_in_place(_path_of(building.parent))
    for replaced in checkpoints.glob(".step*.replaced"):
        if not _path_of(replaced).exists():
            replaced.rename(_path_of(replaced))
    for half in checkpoints.glob(".step*"):
        shutil.rmtree(half)


def _replaced_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _path_of(hidden: Path) -> Path:
    return hidden.with_name(hidden.stem.removeprefix("."))


def complete_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Step and folder, oldest first; half-written ones are none."""
    found = sorted((run_dir / CHECKPOINTS).glob(f"step*/{COMPLETE_FILE}"))
    return [(int(path.parent.name.removeprefix("step")), path.parent) for path in found]


def add_books(books: Books, path: Path) -> None:
    """Have the checkpoint that is written to `path` contain what stands in the books now: which
    prompts were drawn, which groups are open, which versions and steps there were. Blocks."""
    folder = job_state_of(path)
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        books.copy_to(folder / BOOKS_FILE)
