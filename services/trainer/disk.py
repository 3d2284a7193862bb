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

from services.trainer.pausing import JobPaused

_OF_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT)


class Unwritable(JobPaused):
    """A file could not be written; it is as it was before."""

    def __init__(self, path: Path, cause: Exception) -> None:
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        super().__init__(
            f"{path} cannot be written: {cause} ({free:,} bytes are free there). Nothing is lost: "
            "make space and resume the job"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `Unwritable` for a disk that is full, or fails, under SQLite or a plain file."""
    try:
        yield
    except sqlite3.OperationalError as err:
        if err.sqlite_errorcode & 0xFF in _OF_SQLITE:
            raise Unwritable(path, err) from err
        raise
    except OSError as err:
        if err.errno in _OF_THE_SYSTEM:
            raise Unwritable(Path(err.filename or path), err) from err
        raise
