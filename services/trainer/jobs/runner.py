"""Runs the jobs of the queue, one at a time, and brings each to a state that says what happened.

next job ─> Conductor.run ─┬─ returns ──────────> finished
                           ├─ JobPaused ────────> paused      (wish, bound, nothing to train on)
                           ├─ wish to cancel ───> cancelled
                           ├─ an error of ours ─> failed
                           ├─ stop ────────────> stays running: the next process takes it up
                           └─ a crash ─────────> the same, MAX_ATTEMPTS times without a step
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from services.trainer.announcements import let_expire, retire_others
from services.trainer.assembly import Parts, assemble
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.conductor import Conductor
from services.trainer.config import TrainerConfig
from services.trainer.disk import Unwritable, writing
from services.trainer.events import EventLog, event_maker
from services.trainer.jobs.reports import Reports
from services.trainer.jobs.store import JobStore, StoredJob, Wish
from services.trainer.keeper import StartRanks
from services.trainer.launch import LaunchBoard
from services.trainer.pausing import JobPaused
from services.trainer.prompts import PromptSource
from services.trainer.ranks import Ranks
from services.trainer.replayer import Replayer
from services.trainer.run_environment import write_environment
from services.trainer.steps import EndState
from services.trainer.tracking.process import tracking
from shared.environment import environment_of
from shared.errors import TandemError
from shared.http import HttpClient
from shared.job import JOB_FILE
from shared.tasks import end, first_of
from shared.telemetry import bind_process, gauge

log = structlog.get_logger()
CLOSE_S = 5.0  # what a cancelled conductor may need beyond its loops' goodbye
SPACE_POLL_S = 2.0  # a full disk under the queue is tried again
MAX_ATTEMPTS = 4  # times that the process may die, unasked, without a step of the job between
BeginRanks = Callable[[StoredJob, Path], StartRanks]


class JobRunner:
    """`active` is the job in progress, for whoever asks over HTTP."""

    def __init__(
        self,
        redis: Redis,
        *,
        store: JobStore,
        config: TrainerConfig,
        http: HttpClient,
        shards_url: str,
        board: LaunchBoard | None = None,
        begin_ranks: BeginRanks | None = None,
    ) -> None:
        self.active: Conductor | Replayer | None = None
        self._redis = redis
        self._store = store
        self._config = config
        self._http = http
        self._shards_url = shards_url
        self._board = board or LaunchBoard()
        self._begin_ranks = begin_ranks or self._torchrun
        self._wake = asyncio.Event()
        self._environment: dict[str, Any] = {}
        self._is_active = gauge("trainer_job_active", "1 while a job is in progress, else 0.")
        self._early: dict[str, str] = {}  # what a job is at that has no conductor yet, or any more
        self.reports = Reports(deadline_s=config.conductor.report_s)

    def run_dir(self, job_id: str) -> Path:
        return self._config.runs_dir.resolve() / job_id

    def look(self) -> None:
        """The queue, or a wish for a job, has changed."""
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run jobs until `stop`; a job in progress then stays the running one."""
        self._environment = await asyncio.to_thread(environment_of, self._config)
        running = [job.job_id for job in self._store.all() if job.state == "running"]
        await retire_others(self._redis, running)
        while not stop.is_set():
            self._wake.clear()
            if (job := self._store.next_job()) is None:
                await first_of(stop, self._wake)
            else:
                await self._run_job(job, stop)

    async def _run_job(self, job: StoredJob, stop: asyncio.Event) -> None:
        bind_process(job_id=job.job_id)
        self._is_active.set(1)
        try:
            if await self._stored(partial(self._store.begin, job.job_id), stop):
                await self._attempt(self._store.get(job.job_id), stop)
        finally:
            self._is_active.set(0)
            self._early.clear()
            bind_process(job_id=None)

    async def _attempt(self, job: StoredJob, stop: asyncio.Event) -> None:
        log.info("job_begins", job_id=job.job_id, attempt=job.attempts)
        if job.attempts > MAX_ATTEMPTS:
            deaths = f"the trainer died {MAX_ATTEMPTS} times in a row"
            await self._not_begun(job, f"{deaths}, and the job made no step between", stop)
            return
        try:
            with writing(self.run_dir(job.job_id)):
                parts = await self._open(job, stop)
        except JobPaused as err:
            await self._not_begun(job, str(err), stop, paused=err)
            return
        except (TandemError, ValueError, OSError) as err:
            log.warning("job_cannot_begin", job_id=job.job_id, error=str(err))
            await self._not_begun(job, f"{type(err).__name__}: {err}", stop)
            return
        if parts is None:
            self._store.give_back(job.job_id)
            return
        replays = job.job.mode == "train_only"
        async with tracking(job.job.tracking, self.run_dir(job.job_id)):
            await self._conduct(Replayer(parts) if replays else Conductor(parts), job, stop)

    async def _not_begun(
        self, job: StoredJob, error: str, stop: asyncio.Event, *, paused: JobPaused | None = None
    ) -> None:
        """It was running, perhaps, and others still serve it; no conductor tells them."""
        was_asked = paused is not None and paused.on_request
        ended: EndState = "paused" if paused else "failed"
        await self._end(job.job_id, ended, error, stop, was_asked=was_asked)
        await retire_others(self._redis, [])
        if not paused:
            await let_expire(self._redis, job.job_id)

    async def _open(self, job: StoredJob, stop: asyncio.Event) -> Parts | None:
        """None when we are stopped before the job's data is there."""
        run_dir = self.run_dir(job.job_id)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / JOB_FILE).write_text(job.job.model_dump_json(indent=2) + "\n")
        await asyncio.to_thread(write_environment, run_dir, self._config.name, self._environment)
        source = await self._source(job, stop)
        if source is None:
            return None
        return assemble(
            self._redis,
            source=source,
            run_dir=run_dir,
            start_ranks=self._begin_ranks(job, run_dir),
            http=self._http,
            trainer_url=self._config.url,
            shards_url=self._shards_url,
            replica=self._config.name,
            config=self._config.conductor,
        )

    async def _source(self, job: StoredJob, stop: asyncio.Event) -> PromptSource | None:
        """Read, or download, the job's data; a wish breaks that off, and raises `JobPaused`."""
        data, left = job.job.data, threading.Event()
        self._early[job.job_id] = f"reading {data.path or f'data set {data.dataset}'}"
        load = partial(PromptSource.load, job.job_id, job.job, left=left)
        loading = asyncio.create_task(asyncio.to_thread(load), name="data is read")
        try:
            while not loading.done() and not stop.is_set():
                if wish := self._store.get(job.job_id).wish:
                    done = "cancelled" if wish == "cancel" else "paused"
                    raise JobPaused(f"{done} on request", on_request=True)
                self._wake.clear()
                await first_of(stop, self._wake, loading, timeout_s=1.0)
            return loading.result() if loading.done() else None
        finally:
            left.set()
            await asyncio.wait({loading}, timeout=CLOSE_S)
            await end(loading)

    def doing(self, job_id: str) -> str | None:
        """What a job that runs is at, and what a wish for it waits for."""
        active = self.active
        if active is not None and active.parts.job_id == job_id:
            return active.parts.doing
        return self._early.get(job_id)

    def warnings(self, job_id: str) -> list[str]:
        """What somebody has to end before a job that runs can go on."""
        active = self.active
        if active is not None and active.parts.job_id == job_id:
            return active.parts.rollback.warnings
        return []

    async def _stored(self, write: Callable[[], object], stop: asyncio.Event) -> bool:
        """Once the disk of the queue takes it. False when we are stopped before: the next process
        finds the job as it was."""
        while True:
            try:
                write()
            except Unwritable as err:
                log.warning("queue_unwritable", error=str(err), again_after_s=SPACE_POLL_S)
            else:
                return True
            await first_of(stop, timeout_s=SPACE_POLL_S)
            if stop.is_set():
                return False

    async def _conduct(
        self, conductor: Conductor | Replayer, job: StoredJob, stop: asyncio.Event
    ) -> None:
        ended: EndState | None = None
        error: str | None = None
        was_asked = False
        saves = True
        self.active = conductor
        running = asyncio.create_task(conductor.run(), name=job.job_id)
        try:
            with writing(self.run_dir(job.job_id)):
                wish = await self._until_over(running, conductor, job, stop)
                if wish == "cancel":
                    ended = "cancelled"
                elif running.done():
                    running.result()
                    ended = "finished"
        except JobPaused as err:
            is_cancelled = self._store.get(job.job_id).wish == "cancel"
            ended, error = "cancelled" if is_cancelled else "paused", str(err)
            was_asked = err.on_request
            saves = not isinstance(err, Unwritable)
        except (TandemError, ValueError, OSError) as err:
            log.exception("job_failed", job_id=job.job_id)
            ended, error = "failed", f"{type(err).__name__}: {err}"
        finally:
            self.active = None
            self._early[job.job_id] = "closing the run" + (f": {error}" if error else "")
            await end(running, within_s=self._config.conductor.goodbye_s + CLOSE_S)
            await self._close(conductor, ended, error, saves=saves)
        if ended is not None:
            await self.reports.write(self.run_dir(job.job_id))
            await self._end(job.job_id, ended, error, stop, was_asked=was_asked)

    async def _close(
        self,
        conductor: Conductor | Replayer,
        ended: EndState | None,
        error: str | None,
        *,
        saves: bool,
    ) -> None:
        """A full disk takes no goodbye either; the job's next process makes up for it."""
        try:
            with writing(conductor.parts.run_dir):
                await conductor.close(ended, error=error, saves=saves)
        except Unwritable as err:
            log.warning("run_not_closed", error=str(err))

    async def _end(
        self,
        job_id: str,
        ended: EndState,
        error: str | None,
        stop: asyncio.Event,
        *,
        was_asked: bool,
    ) -> None:
        """A pause may have been taken back, or overtaken by a cancel, since it was obeyed."""
        wish = self._store.get(job_id).wish
        if not await self._stored(partial(self._store.end, job_id, ended, error), stop):
            return
        state = self._store.get(job_id).state
        log.info("job_ended", job_id=job_id, state=state, error=error)
        if was_asked and ended == "paused" and wish is None:  # it goes on like a paused one
            await self._stored(partial(self._store.resume, job_id), stop)
        elif ended == "paused" and state == "cancelled":
            await self.tell_cancelled(job_id)

    async def _until_over(
        self,
        running: asyncio.Task[None],
        conductor: Conductor | Replayer,
        job: StoredJob,
        stop: asyncio.Event,
    ) -> Wish | None:
        """Wait for the job, a stop, or a wish; a pause is passed on, a cancel is answered."""
        step = conductor.parts.books.last_step()  # of earlier processes: no progress of this one
        while not running.done() and not stop.is_set():
            wish = self._store.get(job.job_id).wish
            if wish == "cancel":
                return "cancel"
            if wish == "pause":
                conductor.pause_asked.set()
            else:
                conductor.pause_asked.clear()
            if conductor.parts.progress.step > step:
                step = conductor.parts.progress.step
                self._store.note_progress(job.job_id)
            self._wake.clear()
            await first_of(stop, self._wake, running, timeout_s=1.0)
        if stop.is_set():  # now: whoever asked may kill us before the conductor has said goodbye
            self._store.give_back(job.job_id)
        return None

    async def tell_cancelled(self, job_id: str) -> None:
        """A job was cancelled while it waited or paused: no conductor tells it, and if it ran, the
        broker still has its keys, and its report says paused."""
        await let_expire(self._redis, job_id)
        run_dir = self.run_dir(job_id)
        if await asyncio.to_thread(_note_cancelled, run_dir, job_id, self._config.name):
            await self.reports.write(run_dir)

    def _torchrun(self, job: StoredJob, run_dir: Path) -> StartRanks:
        async def start() -> Ranks:
            return await Ranks.start(
                job_id=job.job_id,
                job=job.job,
                run_dir=run_dir,
                deadlines=self._config.ranks,
                board=self._board,
                listen=self._config.host,
            )

        return start


def _note_cancelled(run_dir: Path, job_id: str, replica: str) -> bool:
    """In the run's record, if it has one; nobody else writes there while no job is active."""
    if not (run_dir / BOOKS_FILE).exists():
        return False
    books = Books(run_dir / BOOKS_FILE)
    record = EventLog(run_dir, books)
    record.note(event_maker(job_id, replica)("job_finished", state="cancelled", error=None))
    record.close()
    books.close()
    return True
