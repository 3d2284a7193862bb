"""Where a conversion builds its result, so that it can be killed at any moment and go on.

.NAME.converting/   plan.json   what is converted to what; another plan starts over
                    done/       one record a finished shard: size, checksum, rows for the index
                    result/     the directory that is renamed to NAME when nothing is missing
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.trainer.convert.targets import Shard, file_checksum
from shared.errors import ConfigInvalid

REPORT_FILE = "conversion.json"

_PLAN_FILE = "plan.json"
_SLACK_BYTES = 64 << 20  # config, tokenizer, index; and a disk should not be filled to the brim
_KNOWN_FILES = ("config.json", "metadata.json", REPORT_FILE)  # one is in all that we overwrite


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file."""

    file: str
    num_bytes: int
    algorithm: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Record(Written):
    """A finished shard."""

    rows: list[list[Any]]


class Workspace:
    """Use `workspace(target)`, which locks it."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.root = target.with_name(f".{target.name}.converting")
        self.result = self.root / "result"
        self._done = self.root / "done"

    def prepare(self, plan: Mapping[str, Any]) -> bool:
        """Have the directories; False if what another plan left there was thrown away."""
        file = self.root / _PLAN_FILE
        text = json.dumps(plan, indent=2, sort_keys=True)
        fits = not file.exists() or file.read_text() == text
        if not fits:
            shutil.rmtree(self.result, ignore_errors=True)
            shutil.rmtree(self._done, ignore_errors=True)
        self.result.mkdir(exist_ok=True)
        self._done.mkdir(exist_ok=True)
        _write(file, text)
        return fits

    def kept(self, shards: Sequence[Shard]) -> dict[str, Record]:
        """Records of shards that are whole, by file; everything else in the result is removed."""
        records = {}
        for shard in shards:
            path = self._done / f"{shard.file}.json"
            if path.exists():
                record = Record(**json.loads(path.read_text()))
                if self._is_whole(record):
                    records[shard.file] = record
        for path in self.result.iterdir():
            if path.name not in records:
                path.unlink()
        return records

    def keep(self, record: Record) -> None:
        _write(self._done / f"{record.file}.json", json.dumps(asdict(record)))

    def check_space(self, needed_bytes: int) -> None:
        """ConfigInvalid unless the file system has room for what is still to be written."""
        needed, free = needed_bytes + _SLACK_BYTES, shutil.disk_usage(self.root).free
        if free < needed:
            raise ConfigInvalid(
                f"{self.target.parent}: {_gigabytes(needed)} must be free for the result, "
                f"{_gigabytes(free)} are: free {_gigabytes(needed - free)} there or choose "
                f"another place; finished shards are kept."
            )

    def finish(self) -> None:
        """The target appears, whole; an older one is gone only then."""
        replaced = self.root / "replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        for path in sorted(self.result.iterdir()):
            _sync(path)  # config, tokenizer, index; shards were when they were finished
        _sync(self.result)
        if self.target.exists():
            self.target.rename(replaced)
        self.result.rename(self.target)
        _sync(self.root)
        _sync(self.target.parent)
        shutil.rmtree(self.root)

    def _is_whole(self, record: Record) -> bool:
        return fault_of(self.result / record.file, record) is None


@contextmanager
def workspace(target: Path) -> Iterator[Workspace]:
    """ConfigInvalid while another process converts into the same target."""
    space = Workspace(target)
    space.root.mkdir(parents=True, exist_ok=True)
    with (space.root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise ConfigInvalid(f"{target} is being made by another process.") from err
        yield space


def fault_of(path: Path, written: Written) -> str | None:
    """What is wrong with a finished file; None if it is what was written."""
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != written.num_bytes:
        return f"{path} has {size} bytes, {written.num_bytes} were written"
    if (found := file_checksum(path, written.algorithm)) != written.checksum:
        return f"{path} has checksum {found}, {written.checksum} was written"
    return None


def check_target(target: Path, *, overwrite: bool) -> None:
    """ConfigInvalid if `target` may not be replaced."""
    if not target.exists():
        return
    if not overwrite:
        raise ConfigInvalid(f"{target} exists: remove it, or replace it with --overwrite.")
    if not any((target / name).exists() for name in _KNOWN_FILES):
        raise ConfigInvalid(f"{target} is no checkpoint, so it is not overwritten.")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """A file's bytes, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
