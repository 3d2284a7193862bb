"""Checks in, outcomes out: two lanes of worker processes, each check within its limits.

    grade() ──> waiting line ──batch──> worker ───────────────────────────results──> outcomes
                     ^                    │ a check runs for over 50 ms
                     └─ its neighbours ───┴─> slow lane: the worker is niced where it stands, and a
                                              spare one, forked beforehand, takes its place

A hostile answer costs its neighbours 50 ms. With the slow lane full, its worker is killed and it
waits for a place; its own limit begins anew with it. Limits are watched from here: wall clock and
CPU time of the check, memory of its process. Every grader runs in the pool, however cheap, so that
nothing is graded on the event loop and all have the same limits; a group costs one round trip.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, get_args

import structlog

from services.reward.graders.grader import HEAVY, addresses
from services.reward.outcomes import read_outcome
from services.reward.pool.forking import Zygote
from services.reward.pool.requests import Check, Request, Task, WaitingLine, new_request
from services.reward.pool.settings import PoolConfig
from services.reward.pool.worker import Running, Worker
from shared.errors import Fatal
from shared.messages import GraderError, Outcome, Timeout
from shared.telemetry import counter, gauge, histogram

log = structlog.get_logger()

WATCH_S = 0.05
CPU_STEP_S = 0.01
STARVED_PATIENCE = 4
COLD_SLOW_AFTER_S = 1.0  # until they are warm, an expression's first time is slow by itself

SECONDS = histogram(
    "reward_check_seconds", "Time of a check in its process", ("lane",),
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 2, 5, 10),
)  # fmt: skip
LATENCY = histogram(
    "reward_check_latency_seconds", "From request to outcome", ("lane",),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)  # fmt: skip
OUTCOMES = counter("reward_outcomes_total", "Checks by kind of outcome", ("kind",))
DEPTH = gauge("reward_queue_depth", "Checks that wait for a worker", ("lane",))
Cause = Literal["memory", "slow", "age", "limit", "slow lane full", "died"]
ENDED = counter(
    "reward_workers_ended_total", "Grading processes ended, by cause", ("cause",), get_args(Cause)
)


class GradingPool:
    """Built by `start`; `close` it. `failure` says why it can grade no more."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._graders = addresses(config.plug_ins)
        self._zygote: Zygote | None = None
        self._line = WaitingLine()
        self._slow_line: deque[Task] = deque()
        self._workers: set[Worker] = set()
        self._spares: list[Worker] = []  # connected, and given nothing yet
        self._num_slow_coming = 0
        self._open: set[Request] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self.failure: str | None = None

    @classmethod
    async def start(cls, config: PoolConfig) -> "GradingPool":
        """Returns when every worker takes checks; mathematics is loaded when it is asked for.

        Raises `Fatal` when a grader cannot be loaded.
        """
        pool = cls(config)
        begin_s = time.monotonic()
        try:
            pool._zygote = await Zygote.start(config, pool._fail)
            await asyncio.gather(
                *(pool._add_worker() for _ in range(config.workers)),
                *(pool._add_spare() for _ in range(config.spare_workers)),
            )
        except BaseException:
            await pool.close()
            raise
        seconds = round(time.monotonic() - begin_s, 3)
        log.info("grading_pool_started", workers=config.workers, seconds=seconds)
        return pool

    @property
    def grader_names(self) -> list[str]:
        return sorted(self._graders)

    @property
    def pids(self) -> list[int]:
        return sorted(worker.pid for worker in self._workers)

    @property
    def depth(self) -> int:
        """Checks that wait for a worker."""
        return len(self._line) + len(self._slow_line)

    async def grade(self, checks: Sequence[Check]) -> list[Outcome]:
        """One outcome per check, in order. ValueError for a grader that does not exist."""
        if unknown := {check.grader for check in checks} - self._graders.keys():
            known = ", ".join(self.grader_names)
            raise ValueError(f"no grader {min(unknown)!r}; there are {known}")
        if self.failure is not None:
            raise Fatal(self.failure)
        if not checks:
            return []
        if HEAVY & {check.grader for check in checks}:
            await self.prepare()
        request = new_request(checks)
        self._open.add(request)
        self._line.add(request)
        self._dispatch()
        try:
            await request.done
        finally:
            self._open.discard(request)
            request.waiting.clear()  # of one that was given up
        return [outcome for outcome in request.outcomes if outcome is not None]

    async def prepare(self) -> None:
        """Have the heavy graders loaded; for a job that will need them, ahead of its checks."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(), name="prepare_graders")
        await asyncio.shield(self._preparing)

    async def warmed_up(self) -> None:
        """Wait until the loaded graders have met the usual expressions."""
        assert self._zygote is not None
        await self._zygote.is_warm.wait()
        while self._background:
            await asyncio.wait(self._background)

    async def guard(self, stop: asyncio.Event) -> None:
        """Until `stop`; raises `Fatal` when the pool can grade no more."""
        waits = {asyncio.create_task(event.wait()) for event in (stop, self._failed)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.failure is not None:
            raise Fatal(self.failure)

    async def close(self) -> None:
        """End every process; open requests raise `Fatal`."""
        self._fail("the grading pool is closed")
        background = [*self._background, *filter(None, [self._preparing])]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for worker in (*self._workers, *self._spares):
            worker.close()
        self._workers, self._spares = set(), []
        if self._zygote is not None:
            await self._zygote.close()

    # Work goes out.

    def _dispatch(self) -> None:
        for worker in [worker for worker in self._workers if not worker.batch]:
            if tasks := self._next_tasks(worker):
                worker.send(tasks)
                self._look_after(
                    worker, min(self._slow_after_s(tasks[0]), tasks[0].check.timeout_s)
                )
        places = self._config.slow_workers - self._num_slow
        for _ in range(min(len(self._slow_line), places)):
            self._num_slow_coming += 1
            self._do(self._add_slow_worker())
        DEPTH.labels("normal").set(len(self._line))
        DEPTH.labels("slow").set(len(self._slow_line))

    def _next_tasks(self, worker: Worker) -> list[Task]:
        if worker.is_slow:
            return [self._slow_line.popleft()] if self._slow_line else []
        if worker.is_stale:
            return []
        workers = self._config.workers
        return self._line.take(max_batch=self._config.max_batch, num_workers=workers)

    # Results come in.

    def _on_report(self, worker: Worker, report: list[Any]) -> None:
        is_spent, results = report
        for index, seconds, body in results:
            task = worker.batch[index]
            if task is not None:
                SECONDS.labels(_lane(task)).observe(seconds)
                self._settle(task, read_outcome(body))
        if is_spent:
            self._replace(worker, "memory")
        elif not worker.open_tasks():
            self._batch_done(worker)
        self._dispatch()

    def _settle(self, task: Task, outcome: Outcome) -> None:
        if task.settle(outcome):
            OUTCOMES.labels(outcome.kind).inc()
            LATENCY.labels(_lane(task)).observe(time.monotonic() - task.request.asked_s)

    def _batch_done(self, worker: Worker) -> None:
        runs_on = None in worker.batch  # what was handed over; a next check would wait behind it
        worker.batch = []
        worker.stop_watch()
        if worker.is_slow and (runs_on or not self._slow_line):
            self._replace(worker, "slow")
        elif worker.is_stale or worker.num_checks >= self._config.max_checks_per_worker:
            self._replace(worker, "age")

    def _slow_after_s(self, task: Task) -> float:
        assert self._zygote is not None
        is_cold = task.check.grader in HEAVY and not self._zygote.is_warm.is_set()
        return COLD_SLOW_AFTER_S if is_cold else self._config.slow_after_s

    def _look_after(self, worker: Worker, seconds: float) -> None:
        worker.stop_watch()
        loop = asyncio.get_running_loop()
        worker.watch = loop.call_later(max(seconds, 0.001), self._look_at, worker)

    def _look_at(self, worker: Worker) -> None:
        """A worker has been busy for a while: is one check taking long?"""
        running = worker.running()
        task = running.task
        if task is None or task.is_settled:
            self._look_after(worker, self._config.slow_after_s)
            return
        limit_s = task.check.timeout_s
        used_bytes = worker.memory_bytes()
        if running.wall_s >= limit_s or running.cpu_s >= limit_s:
            self._stop_check(worker, task, Timeout(after_s=limit_s))
        elif used_bytes > self._config.memory_bytes:
            reason = f"{used_bytes} bytes of memory exceed {self._config.memory_bytes}"
            self._stop_check(worker, task, GraderError(reason=reason))
        elif not worker.is_slow and self._is_slow(running, self._slow_after_s(task)):
            self._to_slow_lane(worker, task)
        else:
            pause_s = self._slow_after_s(task) - running.wall_s
            pause_s = pause_s if pause_s > 0 else WATCH_S
            self._look_after(worker, min(pause_s, limit_s - running.wall_s))

    def _is_slow(self, running: Running, after_s: float) -> bool:
        """By the clock; but a check is not slow because the machine gave it no core."""
        is_starved = running.wants_cpu and running.cpu_s < after_s - CPU_STEP_S
        patience = STARVED_PATIENCE if is_starved else 1
        return running.wall_s >= after_s * patience

    def _stop_check(self, worker: Worker, task: Task, outcome: Outcome) -> None:
        self._settle(task, outcome)
        self._replace(worker, "limit")
        self._dispatch()

    def _to_slow_lane(self, worker: Worker, task: Task) -> None:
        task.is_slow = True
        self._line.hand_back(other for other in worker.open_tasks() if other is not task)
        if self._num_slow < self._config.slow_workers:
            worker.batch = [other if other is task else None for other in worker.batch]
            self._fill_place_of(worker)
            worker.is_slow = True
            worker.lower_priority(self._config.slow_nice)
            self._look_after(worker, WATCH_S)
        else:
            worker.batch = []
            self._replace(worker, "slow lane full")
            self._slow_line.append(task)
            loop = asyncio.get_running_loop()
            loop.call_later(self._config.slow_wait_s, self._give_up_waiting, task)
        self._dispatch()

    def _give_up_waiting(self, task: Task) -> None:
        if task in self._slow_line:
            self._slow_line.remove(task)
            waited = f"{self._config.slow_wait_s:g} s"
            self._settle(task, GraderError(reason=f"queue full: no slow place within {waited}"))

    # Workers come and go.

    @property
    def _num_slow(self) -> int:
        return sum(worker.is_slow for worker in self._workers) + self._num_slow_coming

    async def _forked(self) -> Worker:
        assert self._zygote is not None
        return await self._zygote.fork(self._on_report, self._on_death)

    async def _add_worker(self) -> None:
        self._workers.add(await self._forked())
        self._dispatch()

    async def _add_spare(self) -> None:
        self._spares.append(await self._forked())

    async def _add_slow_worker(self) -> None:
        try:
            worker = await self._forked()
        finally:
            self._num_slow_coming -= 1
        worker.is_slow = True
        worker.lower_priority(self._config.slow_nice)
        self._workers.add(worker)
        self._dispatch()

    def _replace(self, worker: Worker, cause: Cause) -> None:
        """End a worker, give its checks to others, and fill its place in the normal lane."""
        self._workers.discard(worker)
        worker.close()
        self._line.hand_back(worker.open_tasks())
        ENDED.labels(cause).inc()
        self._do(self._end(worker))
        self._fill_place_of(worker)

    def _fill_place_of(self, worker: Worker) -> None:
        if worker.is_slow or worker.is_stale:
            return
        if self._spares:
            self._workers.add(self._spares.pop())
            self._do(self._add_spare())
        else:
            self._do(self._add_worker())

    async def _end(self, worker: Worker) -> None:
        assert self._zygote is not None
        how = await self._zygote.end(worker)
        log.debug("grading_process_ended", pid=worker.pid, how=how)

    def _on_death(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._do(self._bury(worker))
        elif worker in self._spares:
            self._spares.remove(worker)
            self._do(self._end(worker))
            self._do(self._add_spare())

    async def _bury(self, worker: Worker) -> None:
        """A worker died by itself. The check that it was in is at fault, the others are not."""
        assert self._zygote is not None
        how = await self._zygote.end(worker)
        log.warning("grading_process_died", pid=worker.pid, how=how)
        task = worker.running().task if worker.batch else None
        if task is not None:
            self._settle(task, GraderError(reason=f"the grading process died: {how}"))
        self._line.hand_back(worker.open_tasks())
        ENDED.labels("died").inc()
        self._fill_place_of(worker)
        self._dispatch()

    async def _prepare(self) -> None:
        """Load, and go on with workers forked after it; again once the parser has warmed up."""
        assert self._zygote is not None
        await self._zygote.prepare()
        await self._renew()
        self._do(self._renew_when_warm())

    async def _renew_when_warm(self) -> None:
        assert self._zygote is not None
        await self._zygote.is_warm.wait()
        await self._renew()
        log.info("grading_pool_warm")

    async def _renew(self) -> None:
        """Have another worker for each; busy ones end after their batch."""
        spares, self._spares = self._spares, []
        for spare in spares:
            self._do(self._end(spare))
            await self._add_spare()
        for worker in list(self._workers):
            if worker in self._workers and not worker.is_slow:
                worker.is_stale = True
                if not worker.batch:
                    self._replace(worker, "age")
                await self._add_worker()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; what goes wrong there ends the pool."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._failed.set()
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(Fatal(self.failure))


def _lane(task: Task) -> str:
    return "slow" if task.is_slow else "normal"
