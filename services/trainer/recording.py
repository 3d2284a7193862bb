"""Every group that arrived in a run, and which of them each step trained: enough to train again.

    recording.sqlite    groups: each as it came, graded    steps: who was trained, in which order

A group is kept before its message is acked, a step before its batch is committed, so that a
recording lacks nothing that the books have. What is kept twice (a crash in between) counts once;
a step that the books do not have is none.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgpack

from services.trainer.disk import opened, writing
from shared.errors import Rejected, TandemError
from shared.messages import ScoredGroup

RECORDING_FILE = "recording.sqlite"
_LEVEL = 1  # ids become a quarter; log-probabilities hardly shrink at any level

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups(
    group_id TEXT PRIMARY KEY,
    draw INTEGER NOT NULL,
    body BLOB NOT NULL,
    routes BLOB);
CREATE TABLE IF NOT EXISTS steps(
    step INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    group_ids TEXT NOT NULL,
    reward_sum REAL NOT NULL,
    num_rewards INTEGER NOT NULL);
"""


class RecordingUnreadable(TandemError):
    """There is no recording, or what one of its steps trained is not in it or cannot be read."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """`policy_version` was trained; the rewards are those of groups dropped meanwhile."""

    step: int
    policy_version: int
    group_ids: list[str]
    reward_sum: float
    num_rewards: int


class Recording:
    """Calls are short and synchronous; each write is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = opened(path, _SCHEMA, check_same_thread=False)

    @classmethod
    def of_run(cls, run_dir: Path) -> "Recording":
        """The one that is there."""
        path = run_dir / RECORDING_FILE
        if not path.is_file():
            raise RecordingUnreadable(f"{run_dir} has no {RECORDING_FILE}: record = true keeps one")
        try:
            return cls(path)
        except sqlite3.DatabaseError as err:
            raise RecordingUnreadable(f"{path} is no recording: {err}") from err

    def close(self) -> None:
        self._db.close()

    def keep_group(self, scored: ScoredGroup) -> None:
        """A group that was asked again replaces what came before."""
        prompt = scored.group.prompt
        body = zlib.compress(scored.pack(), _LEVEL)
        self._write(
            "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, NULL)",
            (prompt.group_id, prompt.draw, body),
        )

    def keep_routes(self, group_id: str, routes: Sequence[bytes]) -> None:
        """What the sampler chose inside, packed, one entry a rollout."""
        body = msgpack.packb(list(routes))
        self._write("UPDATE groups SET routes = ? WHERE group_id = ?", (body, group_id))

    def keep_step(self, step: RecordedStep) -> None:
        self._write(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
            (
                step.step,
                step.policy_version,
                json.dumps(step.group_ids),
                step.reward_sum,
                step.num_rewards,
            ),
        )

    def forget_after(self, step: int) -> None:
        """What the books do not have: it was refused, or its process died before it was theirs."""
        self._write("DELETE FROM steps WHERE step > ?", (step,))

    def steps(self) -> list[RecordedStep]:
        with self._reading("its steps"):
            rows = self._db.execute("SELECT * FROM steps ORDER BY step").fetchall()
            return [
                RecordedStep(step, version, json.loads(ids), reward_sum, num)
                for step, version, ids, reward_sum, num in rows
            ]

    def group(self, group_id: str) -> ScoredGroup:
        with self._reading(group_id):
            found = self._db.execute("SELECT body FROM groups WHERE group_id = ?", (group_id,))
            if (row := found.fetchone()) is None:
                raise RecordingUnreadable(f"{self.path} has no group {group_id}")
            return ScoredGroup.unpack(zlib.decompress(row[0]))

    def routes(self, group_id: str) -> tuple[bytes, ...] | None:
        with self._reading(f"the routes of {group_id}"):
            row = self._db.execute(
                "SELECT routes FROM groups WHERE group_id = ?", (group_id,)
            ).fetchone()
            return tuple(msgpack.unpackb(row[0])) if row and row[0] is not None else None

    def groups(self) -> Iterator[ScoredGroup]:
        """All of them, in draw order; also those that no step trained."""
        names = self._db.execute("SELECT group_id FROM groups ORDER BY draw").fetchall()
        for (name,) in names:
            yield self.group(name)

    def group_ids(self) -> Sequence[str]:
        rows = self._db.execute("SELECT group_id FROM groups ORDER BY draw").fetchall()
        return [str(name) for (name,) in rows]

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        with writing(self.path):
            self._db.execute(statement, values)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """The file may be another run's, cut or edited: whoever reads it is told so."""
        try:
            yield
        except (sqlite3.DatabaseError, zlib.error, ValueError, Rejected) as err:
            raise RecordingUnreadable(f"{self.path}: {what} cannot be read: {err}") from err
