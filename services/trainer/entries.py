"""What stands in the books of a run: one table and one class per kind of entry."""

from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import TandemError
from shared.messages import Event

GroupState = Literal["open", "trained", "dropped", "skipped"]
EvalState = Literal["open", "finished", "failed"]
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups(
    draw INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'trained', 'dropped', 'skipped')),
    min_policy_version INTEGER NOT NULL,
    step INTEGER,
    reason TEXT,
    times_fed INTEGER NOT NULL DEFAULT 1,
    arrived INTEGER NOT NULL DEFAULT 0,
    during_step INTEGER,
    reward_sum REAL NOT NULL DEFAULT 0,
    num_rewards INTEGER NOT NULL DEFAULT 0,
    CHECK ((state = 'trained') = (step IS NOT NULL)),
    CHECK ((state IN ('dropped', 'skipped')) = (reason IS NOT NULL)));
CREATE INDEX IF NOT EXISTS groups_by_state ON groups(state);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(during_step);
CREATE TABLE IF NOT EXISTS steps(
    step INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    batch_facts TEXT NOT NULL,
    result TEXT,
    told TEXT);
CREATE TABLE IF NOT EXISTS redo(
    step INTEGER PRIMARY KEY,
    body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evals(
    eval_id TEXT PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    replica TEXT NOT NULL,
    deadline_s REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'finished', 'failed')));
CREATE TABLE IF NOT EXISTS journal(
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS notes(
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL);
"""


class BooksViolated(TandemError):
    """Something tried to count a group twice, or one that was never drawn."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One position of the order of draws: a group to open, or a prompt that is passed over."""

    draw: int
    group_id: str
    min_policy_version: int
    skipped_for: str | None = None
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class DroppedGroups:
    num_groups: int
    reward_sum: float
    num_rewards: int


@dataclass(frozen=True, slots=True)
class Group:
    draw: int
    group_id: str
    state: GroupState
    min_policy_version: int
    step: int | None
    reason: str | None
    times_fed: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Step `step` made policy `policy_version`.

    `result` is None until the ranks answered, `told` (the event's fields) until all was done.
    """

    step: int
    policy_version: int
    batch_facts: dict[str, Any]
    result: dict[str, Any] | None
    told: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """`replica` is held for it until `deadline_s` (unix time); empty: none was found yet."""

    eval_id: str
    policy_version: int
    step: int
    replica: str
    deadline_s: float
    state: EvalState

    @property
    def is_open(self) -> bool:
        return self.state == "open"
