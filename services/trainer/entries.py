"""What stands in the books of a run: one class per kind of entry."""

from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import TandemError
from shared.messages import Event

GroupState = Literal["open", "trained", "dropped", "skipped"]
EvalState = Literal["open", "finished", "failed"]


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
    eval_id: str
    policy_version: int
    step: int
    replica: str
    deadline_s: float
    state: EvalState
