"""The books of one run: which group became what, durable before anything depends on it.

    drawn ──> open ──┬──> trained   exactly once: in the transaction that stores its batch for redo
      └──> skipped   └──> dropped   once, with a reason

A group leaves `open` in one transaction and never returns (but for a whole batch that the learner
refused, which becomes dropped). Messages may come twice and processes may die between any two
lines: what counts is this file. The conductor's own events are written in the same transactions.
"""

import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from services.trainer.disk import opened, transaction
from services.trainer.entries import (
    SCHEMA,
    BooksViolated,
    Draw,
    DroppedGroups,
    EvalRecord,
    EvalState,
    Group,
    Step,
)
from shared.messages import Event

BOOKS_FILE = "books.sqlite"

_GROUP = (
    "SELECT draw, group_id, state, min_policy_version, step, reason, times_fed, arrived"
    " FROM groups "
)
# Why groups came for a step and could not be used: not those dropped before they came.
_UNUSABLE = (
    "SELECT reason, COUNT(*) FROM groups WHERE during_step >= ? AND during_step <= ?"
    " AND reason NOT IN ('surplus', 'buried', 'lost', 'refused') GROUP BY reason ORDER BY reason"
)


class Books:
    """Calls are synchronous and thread-safe; each write is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._db = opened(path, SCHEMA, check_same_thread=False)
        self._closed_step = 0  # the newest step whose groups are chosen

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def copy_to(self, path: Path) -> None:
        """All that stands in them, consistent, in a new file. Others read and write meanwhile: it
        may be gigabytes of batches."""
        with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(path)) as copy:
            source.backup(copy)

    # Groups

    def record_draws(self, draws: Sequence[Draw]) -> None:
        """Take a slot for each draw, or pass over it; they must be the next ones."""
        with self._writing():
            first = self.next_draw()
            if [draw.draw for draw in draws] != list(range(first, first + len(draws))):
                raise BooksViolated(
                    f"draws {[draw.draw for draw in draws]} do not start at {first}"
                )
            for draw in draws:
                state = "skipped" if draw.skipped_for else "open"
                self._db.execute(
                    "INSERT INTO groups(draw, group_id, state, min_policy_version, reason)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (draw.draw, draw.group_id, state, draw.min_policy_version, draw.skipped_for),
                )
                if draw.event is not None:
                    self._note_event(draw.event)

    def drop_group(
        self,
        group_id: str,
        *,
        reason: str,
        event: Event,
        rewards: Sequence[float] | None = None,
    ) -> None:
        """Give the slot of an open group back; `rewards` are its graded samples if it arrived."""
        with self._writing():
            changed = self._db.execute(
                "UPDATE groups SET state = 'dropped', reason = ?"
                " WHERE group_id = ? AND state = 'open'",
                (reason, group_id),
            ).rowcount
            if changed != 1:
                raise BooksViolated(f"{group_id} cannot be dropped ({reason}): it is not open")
            if rewards is not None:
                self._count_rewards(group_id, rewards)
            self._note_event(event)

    def close_collection(self, step: int) -> DroppedGroups:
        """`dropped_during` for good: what comes from here on, even before the step's batch is
        committed, belongs to the next step."""
        with self._lock:
            self._closed_step = step
            return self.dropped_during(step)

    def dropped_during(self, step: int) -> DroppedGroups:
        """What arrived while the groups of `step` were collected and is dropped, also before."""
        with self._lock:
            row = self._db.execute(
                "SELECT COUNT(*), COALESCE(SUM(reward_sum), 0.0), COALESCE(SUM(num_rewards), 0)"
                " FROM groups WHERE during_step = ?",
                (step,),
            ).fetchone()
        return DroppedGroups(*row)

    def num_unusable_during(self, step: int) -> int:
        """Of those, the ones that came for `step` and could not be used by it."""
        return sum(self.reasons_during(step).values())

    def reasons_during(self, step: int) -> dict[str, int]:
        """Why the groups that came for `step` could not be used."""
        return self._unusable(step, step)

    def note_late(self, group_id: str, rewards: Sequence[float]) -> bool:
        """Count what a dropped group earned if this is the first time that it arrives."""
        with self._writing():
            is_first = self._one("SELECT arrived = 0 FROM groups WHERE group_id = ?", group_id)
            if is_first:
                self._count_rewards(group_id, rewards)
        return bool(is_first)

    def note_fed_again(self, group_id: str) -> None:
        with self._writing():
            self._db.execute(
                "UPDATE groups SET times_fed = times_fed + 1 WHERE group_id = ?", (group_id,)
            )

    def group(self, group_id: str) -> Group | None:
        rows = self._groups(_GROUP + "WHERE group_id = ?", group_id)
        return rows[0] if rows else None

    def open_groups(self) -> list[Group]:
        return self._groups(_GROUP + "WHERE state = 'open' ORDER BY draw")

    def groups_of_step(self, step: int) -> list[Group]:
        return self._groups(_GROUP + "WHERE step = ? ORDER BY draw", step)

    def next_draw(self) -> int:
        return int(self._one("SELECT COALESCE(MAX(draw), -1) + 1 FROM groups"))

    def num_open(self) -> int:
        return int(self._one("SELECT COUNT(*) FROM groups WHERE state = 'open'"))

    def oldest_versions(self) -> dict[str, int]:
        """Of each open group, the oldest version that may sample it."""
        with self._lock:
            return dict(
                self._db.execute(
                    "SELECT group_id, min_policy_version FROM groups WHERE state = 'open'"
                )
            )

    def counts(self) -> dict[str, int]:
        """Groups by state, and dropped and skipped ones by reason as `dropped:no_variance`."""
        with self._lock:
            rows = self._db.execute(
                "SELECT state, COALESCE(reason, ''), COUNT(*) FROM groups GROUP BY 1, 2"
            ).fetchall()
        counts = dict.fromkeys(("open", "trained", "dropped", "skipped"), 0)
        for state, reason, number in rows:
            counts[state] += number
            if reason:
                counts[f"{state}:{reason}"] = number
        return counts

    def usable_share(self, num_steps: int = 4) -> float:
        """Of the groups that came for the newest steps, and in time, the share that was trained.

        The step being collected does not count: its usable groups are not known here.
        """
        last = self.last_step()
        since = last - num_steps
        trained = int(self._one("SELECT COUNT(*) FROM groups WHERE step > ?", since))
        reasons = self._unusable(since + 1, last)
        unusable = sum(n for why, n in reasons.items() if why not in ("too_old", "routes_lost"))
        return trained / (trained + unusable) if trained else 1.0

    # Steps and the redo log

    def commit_batch(
        self,
        step: int,
        *,
        body: bytes | None,
        group_ids: Sequence[str],
        policy_version: int,
        batch_facts: Mapping[str, Any],
        rewards: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Count the groups as trained and keep their batch for redo: both or neither.

        `policy_version` is the one that this step makes; without a body it makes none. `rewards`
        are each group's graded samples.
        """
        with self._writing():
            if step != self.last_step() + 1:
                raise BooksViolated(f"step {step} cannot follow step {self.last_step()}")
            for group_id in group_ids:
                earned = rewards.get(group_id, ()) if rewards else ()
                changed = self._db.execute(
                    "UPDATE groups SET state = 'trained', step = ?, arrived = 1,"
                    " reward_sum = ?, num_rewards = ? WHERE group_id = ? AND state = 'open'",
                    (step, math.fsum(earned), len(earned), group_id),
                ).rowcount
                if changed != 1:
                    raise BooksViolated(f"{group_id} cannot be trained by step {step}: not open")
            if body is not None:
                self._db.execute("INSERT INTO redo VALUES (?, ?)", (step, body))
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, NULL, NULL)",
                (step, policy_version, json.dumps(batch_facts)),
            )

    def keep_result(self, step: int, result: Mapping[str, Any]) -> None:
        """Keep what the ranks answered; a second answer (after a replay) changes nothing."""
        with self._writing():
            self._db.execute(
                "UPDATE steps SET result = ? WHERE step = ? AND result IS NULL",
                (json.dumps(result), step),
            )

    def tell_step(self, step: int, *, fields: Mapping[str, Any], event: Event) -> None:
        """Tell once that the step is over."""
        with self._writing():
            changed = self._db.execute(
                "UPDATE steps SET told = ? WHERE step = ? AND told IS NULL",
                (json.dumps(fields), step),
            ).rowcount
            if changed == 1:
                self._note_event(event)

    def refuse_step(self, step: int, *, reason: str, events: Iterable[Event]) -> None:
        """Undo the newest batch, which the ranks would not train: its groups become dropped.

        What they earned counts in the step that is taken instead, which has the same number.
        """
        with self._writing():
            if step != self.last_step() or self.steps(step)[0].result is not None:
                raise BooksViolated(f"step {step} cannot be refused any more")
            self._closed_step = step - 1
            self._db.execute(
                "UPDATE groups SET state = 'dropped', step = NULL, reason = ?, during_step = step"
                " WHERE step = ?",
                (reason, step),
            )
            self._db.execute("DELETE FROM redo WHERE step = ?", (step,))
            self._db.execute("DELETE FROM steps WHERE step = ?", (step,))
            for event in events:
                self._note_event(event)

    def last_step(self) -> int:
        return int(self._one("SELECT COALESCE(MAX(step), 0) FROM steps"))

    def steps(self, first: int = 1) -> list[Step]:
        with self._lock:
            rows = self._db.execute(
                "SELECT step, policy_version, batch_facts, result, told FROM steps"
                " WHERE step >= ? ORDER BY step",
                (first,),
            ).fetchall()
        return [
            Step(step, version, json.loads(facts), _value(result), _value(told))
            for step, version, facts, result, told in rows
        ]

    def redo_steps(self, after: int) -> list[int]:
        """Steps whose batches follow `after`; a gap means the books cannot restore that state."""
        with self._lock:
            rows = self._db.execute(
                "SELECT step FROM redo WHERE step > ? ORDER BY step", (after,)
            ).fetchall()
        steps = [int(row[0]) for row in rows]
        expected = [made.step for made in self.steps(after + 1) if made.policy_version > 0]
        if steps != expected:
            raise BooksViolated(f"redo log holds steps {steps}, replay needs {expected}")
        return steps

    def redo_held(self) -> list[int]:
        """Steps whose batches are still there, oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT step FROM redo ORDER BY step").fetchall()
        return [int(row[0]) for row in rows]

    def redo_body(self, step: int) -> bytes:
        return bytes(self._one("SELECT body FROM redo WHERE step = ?", step))

    def trim_redo(self, up_to: int) -> None:
        """Forget batches of steps that a checkpoint holds."""
        with self._writing():
            self._db.execute("DELETE FROM redo WHERE step <= ?", (up_to,))

    # Evaluations

    def open_eval(self, record: EvalRecord) -> None:
        with self._writing():
            self._db.execute(
                "INSERT INTO evals VALUES (?, ?, ?, ?, ?, 'open')",
                (
                    record.eval_id,
                    record.policy_version,
                    record.step,
                    record.replica,
                    record.deadline_s,
                ),
            )

    def hold_eval(self, record: EvalRecord, event: Event) -> None:
        """A server, or another one, is held for the evaluation until its deadline."""
        with self._writing():
            self._db.execute(
                "UPDATE evals SET replica = ?, deadline_s = ? WHERE eval_id = ?",
                (record.replica, record.deadline_s, record.eval_id),
            )
            self._note_event(event)

    def close_eval(self, eval_id: str, *, state: EvalState, event: Event | None = None) -> bool:
        """Whether the evaluation was still open."""
        with self._writing():
            changed = self._db.execute(
                "UPDATE evals SET state = ? WHERE eval_id = ? AND state = 'open'", (state, eval_id)
            ).rowcount
            if changed and event is not None:
                self._note_event(event)
        return changed == 1

    def evals(self) -> list[EvalRecord]:
        with self._lock:
            rows = self._db.execute("SELECT * FROM evals ORDER BY policy_version, eval_id")
            return [EvalRecord(*row) for row in rows.fetchall()]

    # Events and notes

    def note_event(self, event: Event) -> None:
        with self._writing():
            self._note_event(event)

    def journal(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """The conductor's events with sequence numbers above `after`."""
        with self._lock:
            rows = self._db.execute(
                "SELECT seq, body FROM journal WHERE seq > ? ORDER BY seq", (after,)
            ).fetchall()
        return [(seq, json.loads(body)) for seq, body in rows]

    def last_seq(self) -> int:
        """The last sequence number of the journal, 0 of an empty one."""
        with self._lock:
            (last,) = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()
        return int(last)

    def keep_note(self, key: str, value: str) -> None:
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))

    def read_note(self, key: str) -> str | None:
        with self._lock:
            row = self._db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, transaction(self._db, self.path):
            yield

    def _count_rewards(self, group_id: str, rewards: Sequence[float]) -> None:
        """What a group's samples earned, once it has arrived, in the step being collected."""
        self._db.execute(
            "UPDATE groups SET arrived = 1, during_step = ?, reward_sum = ?, num_rewards = ?"
            " WHERE group_id = ?",
            (
                max(self.last_step(), self._closed_step) + 1,
                math.fsum(rewards),
                len(rewards),
                group_id,
            ),
        )

    def _note_event(self, event: Event) -> None:
        self._db.execute("INSERT INTO journal(body) VALUES (?)", (event.model_dump_json(),))

    def _one(self, query: str, *parameters: Any) -> Any:
        with self._lock:
            row = self._db.execute(query, parameters).fetchone()
        if row is None:
            raise BooksViolated(f"nothing found by {query} {parameters}")
        return row[0]

    def _unusable(self, first: int, last: int) -> dict[str, int]:
        with self._lock:
            rows = self._db.execute(_UNUSABLE, (first, last)).fetchall()
        return {str(reason): int(number) for reason, number in rows}

    def _groups(self, query: str, *parameters: Any) -> list[Group]:
        with self._lock:
            rows = self._db.execute(query, parameters).fetchall()
        return [
            Group(draw, group_id, state, version, step, reason, times_fed, bool(arrived))
            for draw, group_id, state, version, step, reason, times_fed, arrived in rows
        ]


def _value(text: str | None) -> dict[str, Any] | None:
    return None if text is None else dict(json.loads(text))
