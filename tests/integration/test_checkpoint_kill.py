"""`kill -9` before any change that putting a checkpoint in its place makes to the file system."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest

from services.trainer import checkpoint
from services.trainer.books import BOOKS_FILE
from services.trainer.checkpoint_folder import (
    CHECKPOINTS,
    COMPLETE_FILE,
    building_of,
    complete_checkpoints,
    job_state_of,
    settle,
)

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
PROGRESS = {"step": 5, "policy_version": 5}


@pytest.mark.parametrize("has_older", [False, True], ids=["the first", "one that replaces another"])
def test_a_whole_checkpoint_is_left_wherever_a_save_is_killed(
    tmp_path: Path, has_older: bool
) -> None:
    found: list[str | None] = []
    killed = True
    while killed:
        run_dir = tmp_path / str(len(found))
        path = _lay_out(run_dir, has_older=has_older)
        killed = _is_killed(len(found), lambda path=path: checkpoint.place(path, PROGRESS))
        settle(run_dir)
        found.append(_whole(run_dir))
    before = "old" if has_older else None
    num_old = found.count(before)
    assert found == [before] * num_old + ["new"] * (len(found) - num_old)
    assert num_old >= 5  # books, hashes (reads, too), the manifest, the last file and its rename
    assert len(found) - num_old >= (4 if has_older else 2)  # renames, and the older one's files


def _lay_out(run_dir: Path, *, has_older: bool) -> Path:
    """As the ranks have written it, with the books beside it."""
    path = run_dir / CHECKPOINTS / "step00000005"
    if has_older:
        path.mkdir(parents=True)
        (path / "weights").write_text("old")
        (path / COMPLETE_FILE).write_text("{}")
    building_of(path).mkdir(parents=True)
    (building_of(path) / "weights").write_text("new")
    job_state_of(path).mkdir()
    (job_state_of(path) / BOOKS_FILE).write_text("books")
    return path


def _is_killed(number: int, work: Callable[[], Any]) -> bool:
    """`work` in a process that ends itself before it touches the file system for the nth time."""
    pid = os.fork()
    if pid == 0:
        left = number

        def count(event: str, _: Any) -> None:
            nonlocal left
            if event in CHANGES:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def _whole(run_dir: Path) -> str | None:
    """What the one checkpoint holds; nothing else may be left."""
    complete = complete_checkpoints(run_dir)
    assert list((run_dir / CHECKPOINTS).iterdir()) == [path for _, path in complete]
    if not complete:
        return None
    ((_, path),) = complete
    content = (path / "weights").read_text()
    if content == "new":
        verify_integrity_manifest(str(path))
        assert (path / BOOKS_FILE).read_text() == "books"
    return content
