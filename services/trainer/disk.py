"""A disk that takes nothing more stops a job where it can go on: what is written once stays.

Everything that counts is durable before anything depends on it, so whoever writes may fail at any
line; the job pauses, says which file and how much space there is, and goes on once there is more.
"""

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from services.trainer.pausing import JobPaused

_OF_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT)


class Unwritable(JobPaused):
    """A file could not be written; it is as it was before."""

    @classmethod
    def at(cls, path: Path, cause: object) -> Self:
        there = next(place for place in (path, *path.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(there).free
        return cls(
            f"{path} cannot be written: {cause} ({free:,} bytes are free there). Nothing is lost: "
            "make space and resume the job"
        )


def has_room(path: Path, num_bytes: int) -> bool:
    """In a folder. File systems that do not tell their size have room."""
    space = shutil.disk_usage(path)
    return not space.total or num_bytes <= space.free


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `Unwritable` for a disk that is full, or fails, under SQLite or a plain file."""
    try:
        yield
    except sqlite3.OperationalError as err:
        if err.sqlite_errorcode & 0xFF in _OF_SQLITE:
            raise Unwritable.at(path, err) from err
        raise
    except OSError as err:
        if err.errno in _OF_THE_SYSTEM:
            raise Unwritable.at(Path(err.filename or path), err) from err
        raise


def opened(path: Path, schema: str, *, synchronous: str = "FULL", **how: Any) -> sqlite3.Connection:
    """An autocommitting connection with a write-ahead log, and the tables; `how` is to connect."""
    db: sqlite3.Connection = sqlite3.connect(path, isolation_level=None, **how)
    with writing(path):
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.executescript(schema)
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """One write transaction of an autocommitting connection to `path`; an exception inside leaves
    the file as it was."""
    with writing(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
