"""Evaluations of pinned versions: one server is held at a version until its result is there.

lease      due ──> a server serves the version ──> hold it, ask for the evaluation ──> go on
                                                     ├── result, failure, deadline: release
                                                     └── it is gone for good: hold another
dedicated  due ──> one server is always held, at the version of the first open evaluation, which
                   is asked for, and between them at the last one's: training waits for nothing
                   (the only server there is is held for open ones alone)

What is due stands in the books before it has a server, so whoever takes the job up finds it there.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
from redis.asyncio import Redis

from services.trainer.books import Books
from services.trainer.entries import EvalRecord
from services.trainer.events import EventLog, EventMaker
from services.trainer.publisher import Publisher
from shared import topology
from shared.dead_letters import dead_letters
from shared.errors import Rejected
from shared.job import Job
from shared.messages import EvalRequested, Event
from shared.streams import publish, read_from
from shared.tasks import wait_for_event
from shared.telemetry import now_s

log = structlog.get_logger()
CHECK_S = 0.1
LOOK_S = 5.0  # between looks for what got lost
ENDINGS = ("eval_finished", "eval_failed")


class Evaluations:
    """The books say which evaluations are open; holds follow from them.

    A server that is away for more than `grace_s` is not waited for: another is held in its place.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        job: Job,
        books: Books,
        record: EventLog,
        events: EventMaker,
        grace_s: float,
    ) -> None:
        self._redis = redis
        self._job_id = job_id
        self._job = job
        self._books = books
        self._record = record
        self._events = events
        self._grace_s = grace_s
        self._open = {one.eval_id: self._in_time(one) for one in books.evals() if one.is_open}
        served = [one for one in books.evals() if one.replica]
        self._last = max(served, key=lambda one: one.policy_version, default=None)
        self._away_since_s: dict[str, float] = {}
        self._announcing = asyncio.Lock()
        self._look_at_s = 0.0
        self._moved = asyncio.Event()
        self.on_hold: Callable[[], None] = lambda: None

    def holds(self) -> dict[str, int]:
        """Replica -> version that it must keep serving: that of its first open evaluation."""
        held: dict[str, int] = {}
        if self._is_dedicated and self._last is not None:
            held[self._last.replica] = self._last.policy_version
        for one in sorted(self._open.values(), key=lambda one: -one.deadline_s):
            if one.replica:
                held[one.replica] = one.policy_version
        return held

    def needed_versions(self) -> set[int]:
        """Versions that open evaluations will ask for; they must not be deleted."""
        return {one.policy_version for one in self._open.values()}

    def due(self, step: int, policy_version: int) -> bool:
        """Whether the version made by `step` is to be evaluated and has not been asked for."""
        section = self._job.eval
        if section is None:
            return False
        # The last step's version, and the first one that is sampled.
        ends = {self._job.steps, self._job.warm_up.steps if self._job.warm_up else 0}
        if step % section.every_steps and step not in ends:
            return False
        return all(one.policy_version != policy_version for one in self._books.evals())

    def request(self, step: int, policy_version: int) -> None:
        """Note that the version is to be evaluated; `run` holds a server of it, and asks."""
        eval_id = f"{self._job_id}.e{policy_version:08d}"
        asked = EvalRecord(eval_id, policy_version, step, "", self._due_s(), "open")
        self._books.open_eval(asked)
        self._open[eval_id] = asked

    async def wait_held(self) -> None:
        """Until each open evaluation has got a server, or none by its deadline."""
        await self._until(lambda: all(one.replica for one in self._open.values()))

    async def announce(self) -> None:
        """Write the holds where servers look."""
        key = topology.holds(self._job_id)
        async with self._announcing, self._redis.pipeline(transaction=True) as pipe:
            holds = self.holds()  # in its turn: older ones must not overtake newer ones
            pipe.delete(key)
            if holds:
                pipe.hset(key, mapping={name: str(version) for name, version in holds.items()})
            await pipe.execute()

    async def restore(self) -> None:
        """Tell a broker that may have forgotten: holds, and requests that are nowhere in it."""
        await self.announce()
        await self._look_for_lost()

    async def on_event(self, event: Event) -> None:
        """An evaluator's result or failure ends the hold; a second one changes nothing."""
        asked = self._open.get(str(event.fields.get("eval_id")))
        if asked is None or event.name not in ENDINGS:
            return
        finished = event.name == "eval_finished"
        self._books.close_eval(asked.eval_id, state="finished" if finished else "failed")
        await self._release(asked)

    async def run(self, stop: asyncio.Event, publisher: Publisher) -> None:
        """Until `stop`: hold a server for whatever has none, or none any more, ask again for what
        got lost, and give up what is not answered by its deadline."""
        self._look_at_s = time.monotonic() + LOOK_S
        while not stop.is_set():
            if time.monotonic() > self._look_at_s:
                self._look_at_s = time.monotonic() + LOOK_S
                await self._look_for_lost()
            if self._last is not None and publisher.names == [self._last.replica]:
                await self._let_go()  # training has no other server
            for eval_id in list(self._open):
                if (asked := self._open.get(eval_id)) is None:
                    continue  # answered while we saw to another
                if now_s() > asked.deadline_s:
                    error = "no result by the deadline (eval.deadline_s)"
                    if not asked.replica:
                        error = f"no server served version {asked.policy_version}"
                    await self._fail(asked, error)
                elif not asked.replica or self._is_gone(asked.replica, publisher):
                    await self._find_server(asked, publisher)
            await wait_for_event(stop, CHECK_S)

    async def wait_all(self) -> None:
        """Until no evaluation is open; their deadlines bound it. Then nothing is held any more."""
        await self._until(lambda: not self._open)
        await self._let_go()

    async def _let_go(self) -> None:
        """Hold no server between evaluations."""
        self._last = None
        await self.announce()
        self.on_hold()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._moved.clear()
            await wait_for_event(self._moved, 1.0)

    def _due_s(self) -> float:
        assert self._job.eval is not None
        return now_s() + self._job.eval.deadline_s

    def _in_time(self, asked: EvalRecord) -> EvalRecord:
        """As an earlier process left it. One whose time ran out while nobody was there, as in a
        pause, is asked for again."""
        if asked.replica and now_s() <= asked.deadline_s:
            return asked
        return replace(asked, replica="", deadline_s=self._due_s())

    @property
    def _is_dedicated(self) -> bool:
        return self._job.eval is not None and self._job.eval.server == "dedicated"

    def _dedicated_server(self, publisher: Publisher) -> str | None:
        """The server that does nothing else; None when the job wants none, or has just one."""
        names = publisher.names
        if not self._is_dedicated or len(names) < 2:
            return None
        before = self._last.replica if self._last else None
        return before if before in names else names[-1]

    def _free_server(self, asked: EvalRecord, publisher: Publisher) -> str | None:
        """A server that is not held yet: of that version, or, if servers are not going there any
        more, any one, which is brought back to it. One that lost its server, and for which an
        evaluator may wait, also gets one that is held for those after it."""
        held, version = self.holds(), asked.policy_version
        free = [name for name in publisher.serving(version) if name not in held]
        if not free and version != publisher.target:
            free = [name for name in publisher.names if name not in held]
        if not free and asked.replica:
            ends_s = asked.deadline_s
            before = {one.replica for one in self._open.values() if one.deadline_s <= ends_s}
            free = [name for name in publisher.names if name not in before]
        return free[-1] if free else None

    def _is_gone(self, replica: str, publisher: Publisher) -> bool:
        """Whether it is away for longer than the grace of a restart."""
        if replica in publisher.names:
            self._away_since_s.pop(replica, None)
            return False
        since_s = self._away_since_s.setdefault(replica, time.monotonic())
        return time.monotonic() - since_s > self._grace_s

    async def _find_server(self, asked: EvalRecord, publisher: Publisher) -> None:
        """Hold a server, if one is there."""
        dedicated = self._dedicated_server(publisher)
        replica = dedicated or self._free_server(asked, publisher)
        if replica is None:
            return
        held = replace(asked, replica=replica)
        if is_new := not asked.replica:  # evaluations of one server run one after the other
            waiting = [one.deadline_s for one in self._open.values() if one.replica == replica]
            waits_s = max(0.0, max(waiting, default=0.0) - now_s())
            held = replace(held, deadline_s=self._due_s() + waits_s)
        self._books.hold_eval(held, self._told_of_hold(held, before=asked.replica))
        self._record.flush_journal()
        self._open[held.eval_id] = held
        if dedicated:
            self._last = held
        await self.announce()
        self.on_hold()
        if is_new and self._has_turn(held):
            await self._publish(held)
        self._moved.set()

    def _told_of_hold(self, held: EvalRecord, *, before: str) -> Event:
        fields = {
            "eval_id": held.eval_id,
            "policy_version": held.policy_version,
            "step": held.step,
            "replica": held.replica,
        }
        if before:
            log.warning("eval_moved", before=before, **fields)
            return self._events("eval_moved", before=before, **fields)
        assert self._job.eval is not None
        return self._events("eval_requested", suite=self._job.eval.suite, **fields)

    def _has_turn(self, asked: EvalRecord) -> bool:
        """Whether its server is held for it now. Evaluations of one server are asked for one by
        one: an evaluator would wait for a version that the server does not go to before."""
        is_open = asked.eval_id in self._open
        return is_open and self.holds().get(asked.replica) == asked.policy_version

    async def _look_for_lost(self) -> None:
        """Ask, for what has its turn and is neither under way nor answered; what no evaluator can
        do fails.

        A result that the broker lost is missing even if its request was acknowledged after it.
        """
        if not any(self._has_turn(one) for one in self._open.values()):
            return
        known = await self._requested() | await self._answered()
        buried = await self._buried()
        for asked in list(self._open.values()):
            if not self._has_turn(asked) or asked.eval_id in known:
                continue
            if reason := buried.get(asked.eval_id):
                await self._fail(asked, f"no evaluator could do it: {reason}")
            else:
                log.info("eval_asked", eval_id=asked.eval_id)
                await self._publish(asked)

    async def _requested(self) -> set[str | None]:
        """Evaluations whose request no evaluator has finished."""
        entries = await read_from(self._redis, topology.evals(self._job_id), b"0")
        return {_requested_id(body) for _, body in entries}

    async def _buried(self) -> dict[str | None, str]:
        """Why evaluators gave requests up, by evaluation."""
        letters = await dead_letters(self._redis, topology.evals(self._job_id))
        return {_requested_id(letter.body): letter.reason for letter in letters}

    async def _answered(self) -> set[str | None]:
        """Evaluations whose result is on its way to us."""
        found: set[str | None] = set()
        stream, at = topology.events(self._job_id), self._record.stream_id
        while entries := await read_from(self._redis, stream, at):
            at = entries[-1][0]
            found |= {_answered_id(body) for _, body in entries}
        return found

    async def _publish(self, asked: EvalRecord) -> None:
        message = EvalRequested(
            job_id=self._job_id,
            eval_id=asked.eval_id,
            policy_version=asked.policy_version,
            step=asked.step,
            deadline_s=asked.deadline_s,
        )
        await publish(self._redis, topology.evals(self._job_id), message.pack())

    async def _fail(self, asked: EvalRecord, error: str) -> None:
        log.warning("eval_failed", eval_id=asked.eval_id, error=error)
        event = self._events(
            "eval_failed",
            eval_id=asked.eval_id,
            policy_version=asked.policy_version,
            step=asked.step,
            error=error,
        )
        self._books.close_eval(asked.eval_id, state="failed", event=event)
        self._record.flush_journal()
        await self._release(asked)

    async def _release(self, asked: EvalRecord) -> None:
        self._open.pop(asked.eval_id, None)
        await self.announce()
        self._look_at_s = 0.0  # the next one of its server has its turn
        self._moved.set()
        self.on_hold()


def _requested_id(body: bytes) -> str | None:
    """The evaluation that a request is for; None if it is unreadable."""
    try:
        return EvalRequested.unpack(body).eval_id
    except Rejected:
        return None


def _answered_id(body: bytes) -> str | None:
    """The evaluation that an event ends; None of any other event."""
    try:
        event = Event.unpack(body)
    except Rejected:
        return None
    return str(event.fields.get("eval_id")) if event.name in ENDINGS else None
