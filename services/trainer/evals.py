"""Evaluations of pinned versions: one server is held at a version until its result is there.

lease      due ──> a server serves the version ──> hold it, ask for the evaluation ──> go on
                                                     └── result, failure, deadline: release
dedicated  due ──> ask; one server is always held, at the version of the oldest open evaluation,
                   and between them at the last one's: training waits for nothing
"""

import asyncio
import time
from collections.abc import Callable

import structlog
from redis.asyncio import Redis

from services.trainer.books import Books
from services.trainer.entries import EvalRecord
from services.trainer.events import EventLog, EventMaker
from services.trainer.publisher import Publisher
from shared import topology
from shared.errors import Rejected
from shared.job import Job
from shared.messages import EvalRequested, Event
from shared.streams import publish, read_from
from shared.tasks import wait_for_event
from shared.telemetry import now_s

log = structlog.get_logger()
CHECK_S = 0.5
ENDINGS = ("eval_finished", "eval_failed")


class Evaluations:
    """The books say which evaluations are open; holds follow from them."""

    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        job: Job,
        books: Books,
        record: EventLog,
        events: EventMaker,
    ) -> None:
        self._redis = redis
        self._job_id = job_id
        self._job = job
        self._books = books
        self._record = record
        self._events = events
        self._open = {one.eval_id: one for one in books.evals() if one.state == "open"}
        self._last = max(books.evals(), key=lambda one: one.policy_version, default=None)
        self._closed = asyncio.Event()
        self.on_release: Callable[[], None] = lambda: None

    def holds(self) -> dict[str, int]:
        """Replica -> version that it must keep serving: that of its oldest open evaluation."""
        held: dict[str, int] = {}
        if self._is_dedicated and self._last is not None and self._last.replica:
            held[self._last.replica] = self._last.policy_version
        for one in sorted(self._open.values(), key=lambda one: -one.policy_version):
            held[one.replica] = one.policy_version
        return held

    def needed_versions(self) -> set[int]:
        """Versions that open evaluations will ask for; they must not be deleted."""
        return {one.policy_version for one in self._open.values()}

    @property
    def num_open(self) -> int:
        return len(self._open)

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

    async def request(self, step: int, policy_version: int, publisher: Publisher) -> bool:
        """Hold a server of `policy_version` and ask; False if none served it in time."""
        section = self._job.eval
        assert section is not None
        eval_id = f"{self._job_id}.e{policy_version:08d}"
        replica = self._dedicated_server(publisher)
        if replica is None:
            replica = await self._free_server(policy_version, publisher, section.deadline_s)
        deadline_s = self._begins_at_s(replica) + section.deadline_s
        asked = EvalRecord(eval_id, policy_version, step, replica or "", deadline_s, "open")
        self._books.open_eval(
            asked,
            self._events(
                "eval_requested",
                eval_id=eval_id,
                policy_version=policy_version,
                step=step,
                replica=replica,
                suite=section.suite,
            ),
        )
        self._record.flush_journal()
        if replica is None:
            self._fail(asked, f"no server served version {policy_version}")
            return False
        self._open[eval_id] = self._last = asked
        await self.announce()
        self.on_release()  # a dedicated server has another target now
        await self._publish(asked)
        return True

    async def announce(self) -> None:
        """Write the holds where servers look."""
        key = topology.holds(self._job_id)
        holds = self.holds()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if holds:
                pipe.hset(key, mapping={name: str(version) for name, version in holds.items()})
            await pipe.execute()

    async def restore(self) -> None:
        """Tell a broker that may have forgotten: holds, and requests that are nowhere in it."""
        await self.announce()
        if not self._open:
            return
        known = await self._requested() | await self._answered()
        for asked in list(self._open.values()):
            if asked.eval_id not in known:
                await self._publish(asked)

    async def on_event(self, event: Event) -> None:
        """An evaluator's result or failure ends the hold; a second one changes nothing."""
        asked = self._open.get(str(event.fields.get("eval_id")))
        if asked is None or event.name not in ENDINGS:
            return
        finished = event.name == "eval_finished"
        self._books.close_eval(asked.eval_id, state="finished" if finished else "failed")
        await self._release(asked)

    async def run(self, stop: asyncio.Event) -> None:
        """Give up, until `stop`, what is not answered by its deadline."""
        while not stop.is_set():
            for asked in list(self._open.values()):
                if now_s() > asked.deadline_s:
                    self._fail(asked, "no result by the deadline (eval.deadline_s)")
                    await self._release(asked)
            await wait_for_event(stop, CHECK_S)

    async def wait_all(self) -> None:
        """Until no evaluation is open; their deadlines bound it. Then nothing is held any more."""
        while self._open:
            self._closed.clear()
            await wait_for_event(self._closed, 1.0)
        self._last = None
        await self.announce()

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

    def _begins_at_s(self, replica: str | None) -> float:
        """Evaluations of one server run one after the other."""
        waiting = [one.deadline_s for one in self._open.values() if one.replica == replica]
        return max([now_s(), *waiting])

    async def _free_server(
        self, policy_version: int, publisher: Publisher, deadline_s: float
    ) -> str | None:
        """A server of that version that is not held yet; None when none appears in time."""
        ends_s = time.monotonic() + deadline_s
        while time.monotonic() < ends_s:
            await publisher.wait_served(policy_version, deadline_s=1.0)
            held = self.holds()
            free = [name for name in publisher.serving(policy_version) if name not in held]
            if free:
                return free[-1]
            await asyncio.sleep(0.1)
        return None

    async def _requested(self) -> set[str]:
        """Evaluations whose request no evaluator has finished."""
        entries = await read_from(self._redis, topology.evals(self._job_id), b"0")
        return {EvalRequested.unpack(body).eval_id for _, body in entries}

    async def _answered(self) -> set[str]:
        """Evaluations whose result is on its way to us."""
        found: set[str] = set()
        stream, at = topology.events(self._job_id), self._record.stream_id
        while entries := await read_from(self._redis, stream, at):
            at = entries[-1][0]
            found |= {str(_eval_id(body)) for _, body in entries}
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

    def _fail(self, asked: EvalRecord, error: str) -> None:
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

    async def _release(self, asked: EvalRecord) -> None:
        self._open.pop(asked.eval_id, None)
        await self.announce()
        self._closed.set()
        self.on_release()


def _eval_id(body: bytes) -> object:
    try:
        event = Event.unpack(body)
    except Rejected:
        return None
    return event.fields.get("eval_id") if event.name in ENDINGS else None
