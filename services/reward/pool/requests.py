"""Checks on their way through the pool, and the line in which they wait."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.messages import Outcome

MAX_BATCH_CHARS = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One response to be graded against its gold, within `timeout_s` of wall clock."""

    grader: str
    response: str
    gold: str
    timeout_s: float = 5.0


@dataclass(slots=True, eq=False)
class Request:
    """Several checks asked for at once, answered together."""

    outcomes: list[Outcome | None]
    left: int
    done: "asyncio.Future[None]"
    asked_s: float
    waiting: "deque[Task]" = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Task:
    """One check of a request."""

    check: Check
    request: Request
    place: int
    is_slow: bool = False

    @property
    def is_settled(self) -> bool:
        return self.request.outcomes[self.place] is not None

    def settle(self, outcome: Outcome) -> bool:
        """Record the outcome; False when there is one already."""
        if self.is_settled:
            return False
        request = self.request
        request.outcomes[self.place] = outcome
        request.left -= 1
        if request.left == 0 and not request.done.done():
            request.done.set_result(None)
        return True


def new_request(checks: Sequence[Check]) -> Request:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    request = Request([None] * len(checks), len(checks), done, time.monotonic())
    request.waiting.extend(Task(check, request, place) for place, check in enumerate(checks))
    return request


class WaitingLine:
    """Requests take turns, so that one of thousands of checks does not hold up a group of eight."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return sum(len(request.waiting) for request in self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def hand_back(self, tasks: Iterable[Task]) -> None:
        """Put tasks before all others: they have waited once. Those of a request given up go."""
        for task in reversed([one for one in tasks if not one.request.done.done()]):
            if task.request not in self._requests:
                self._requests.appendleft(task.request)
            task.request.waiting.appendleft(task)

    def take(self, *, max_batch: int, num_workers: int) -> list[Task]:
        """The next batch: a worker's share of the request whose turn it is."""
        while self._requests:
            request = self._requests.popleft()
            if not request.waiting:
                continue
            share = min(max_batch, math.ceil(len(request.waiting) / num_workers))
            tasks = [request.waiting.popleft()]
            chars = len(tasks[0].check.response)
            while request.waiting and len(tasks) < share:
                chars += len(request.waiting[0].check.response)
                if chars > MAX_BATCH_CHARS:
                    break
                tasks.append(request.waiting.popleft())
            if request.waiting:
                self._requests.append(request)
            return tasks
        return []
