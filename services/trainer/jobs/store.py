"""The queue of jobs on disk: a job is there before its submission is answered, and stays.

queued ─> running ─> finished | failed | cancelled        a job that was running when the
  ^          └─────> paused ──┐                           process died is taken up again
  └────────── resume ─────────┴── (failed ones, too)
"""

import json
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import structlog
from pydantic import ValidationError

from services.trainer.disk import opened, transaction, writing
from shared.errors import TandemError
from shared.job import Job
from shared.job_answers import ENDED, JobState
from shared.telemetry import now_s

log = structlog.get_logger()
STORE_FILE = "jobs.sqlite"
Wish = Literal["pause", "cancel"]
STOPPED: tuple[JobState, ...] = ("paused", *ENDED)  # nothing happens until somebody asks for it

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL
        CHECK (state IN ('queued', 'running', 'paused', 'finished', 'failed', 'cancelled')),
    document TEXT NOT NULL,
    created_at_s REAL NOT NULL,
    error TEXT,
    wish TEXT CHECK (wish IN ('pause', 'cancel')),
    attempts INTEGER NOT NULL DEFAULT 0,
    idempotency_key TEXT UNIQUE,
    digest TEXT NOT NULL);
"""
_COLUMNS = "job_id, state, document, created_at_s, error, wish, attempts"


class WrongState(TandemError):
    """What was asked does not fit the state that the job is in."""


class KeyReused(TandemError):
    """The same idempotency key came with another job document."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    job_id: str
    state: JobState
    job: Job
    created_at_s: float
    error: str | None
    wish: Wish | None
    attempts: int  # times that it was taken up since its last step, but for those stopped in order


class JobStore:
    """Calls are short and synchronous; each write is on disk when it returns.

    Several queues may share `runs_dir`: an id whose folder is there is not given again. A job that
    an older release stored under other keys fails when the queue is opened, and is not listed.
    """

    def __init__(self, runs_dir: Path, *, queue_dir: Path | None = None) -> None:
        folder = queue_dir or runs_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._runs_dir = runs_dir
        self._path = folder / STORE_FILE
        self._db = opened(self._path, _SCHEMA)
        self._fail_unreadable()

    def close(self) -> None:
        self._db.close()

    def known(self, asked: Job, *, idempotency_key: str | None) -> StoredJob | None:
        """What the key has queued before; `asked` is the job as its document says, paths unread.

        Raises `KeyReused` if that was another document.
        """
        if idempotency_key is None or (known := self._by_key(idempotency_key)) is None:
            return None
        if known[1] != _digest(asked):
            raise KeyReused(
                f"idempotency key {idempotency_key!r} belongs to {known[0]}, "
                "which was submitted with another document"
            )
        return self.get(known[0])

    def add(
        self, job: Job, *, asked: Job | None = None, idempotency_key: str | None = None
    ) -> tuple[StoredJob, bool]:
        """Queue the job; the second value is False if its key had queued it before. `asked` is the
        job before its paths were read, if they were."""
        asked = asked or job
        with transaction(self._db, self._path):
            if known := self.known(asked, idempotency_key=idempotency_key):
                return known, False
            job_id = self._new_id(job.name)
            self._db.execute(
                "INSERT INTO jobs(job_id, state, document, created_at_s, idempotency_key, digest)"
                " VALUES (?, 'queued', ?, ?, ?, ?)",
                (job_id, job.model_dump_json(), now_s(), idempotency_key, _digest(asked)),
            )
        return self.get(job_id), True

    def get(self, job_id: str) -> StoredJob:
        """Raises LookupError for a job that was never submitted."""
        found = self._select("WHERE job_id = ?", job_id)
        if not found:
            raise LookupError(f"there is no job {job_id}")
        return found[0]

    def all(self) -> list[StoredJob]:
        """Every job, oldest first."""
        return self._select("ORDER BY seq")

    def next_job(self) -> StoredJob | None:
        """The job to run: the one that was running, or else the oldest in the queue."""
        found = self._select(
            "WHERE state IN ('running', 'queued') ORDER BY state DESC, seq LIMIT 1"
        )
        return found[0] if found else None

    def begin(self, job_id: str) -> StoredJob:
        """Take a job up, once more if it was running already."""
        self._write(
            "UPDATE jobs SET state = 'running', attempts = attempts + 1, error = NULL"
            " WHERE job_id = ?",
            (job_id,),
        )
        return self.get(job_id)

    def note_progress(self, job_id: str) -> None:
        """The job made a step: earlier deaths of the process are forgiven."""
        self._write("UPDATE jobs SET attempts = 1 WHERE job_id = ?", (job_id,))

    def give_back(self, job_id: str) -> None:
        """The process was asked to stop while it ran the job, which is no death."""
        self._write("UPDATE jobs SET attempts = MAX(attempts - 1, 0) WHERE job_id = ?", (job_id,))

    def end(self, job_id: str, state: JobState, error: str | None = None) -> None:
        """A pause that a wish to cancel has overtaken is none."""
        self._write(
            "UPDATE jobs SET state = CASE WHEN ? = 'paused' AND wish = 'cancel' THEN 'cancelled'"
            " ELSE ? END, error = ?, wish = NULL, attempts = 0 WHERE job_id = ?",
            (state, state, error, job_id),
        )

    def ask(self, job_id: str, wish: Wish) -> StoredJob:
        """Pause or cancel: at once for a job that waits, soon for one that runs.

        A cancel takes the place of a pause that is under way; nothing takes that of a cancel.
        """
        with transaction(self._db, self._path):
            now = self.get(job_id)
            waiting = now.state == "queued" or (now.state == "paused" and wish == "cancel")
            if waiting:
                self.end(job_id, "paused" if wish == "pause" else "cancelled")
            elif now.state == "running":
                if (now.wish, wish) == ("cancel", "pause"):
                    raise WrongState(f"{job_id} is being cancelled; it cannot pause any more")
                self._db.execute("UPDATE jobs SET wish = ? WHERE job_id = ?", (wish, job_id))
            elif now.state != ("paused" if wish == "pause" else "cancelled"):
                raise WrongState(
                    f"{job_id} is {now.state}; only a queued or running job can {wish}"
                )
        return self.get(job_id)

    def resume(self, job_id: str, changed: Job | None = None) -> StoredJob:
        """Queue a paused or failed job again, at its old place; it goes on where it was, as
        `changed` if that is given.

        A job whose pause is under way goes on at once. One that is in line already stays there.
        """
        with transaction(self._db, self._path):
            now = self.get(job_id)
            if now.state in ("paused", "failed"):
                self._db.execute(
                    "UPDATE jobs SET state = 'queued', error = NULL, document = ? WHERE job_id = ?",
                    ((changed or now.job).model_dump_json(), job_id),
                )
            elif changed is not None:
                raise WrongState(f"{job_id} is {now.state}; only a paused or failed job can change")
            elif now.state == "running" and now.wish == "pause":
                self._db.execute("UPDATE jobs SET wish = NULL WHERE job_id = ?", (job_id,))
            elif now.state == "finished":
                raise WrongState(
                    f"{job_id} is finished; only a paused or failed job can resume "
                    f"(all of its {now.job.steps} steps are taken)"
                )
            elif now.state != "queued":
                doing = "being cancelled" if now.wish == "cancel" else now.state
                raise WrongState(f"{job_id} is {doing}; only a paused or failed job can resume")
        return self.get(job_id)

    def _new_id(self, name: str) -> str:
        while True:
            job_id = f"{name}-{secrets.token_hex(2)}"
            if not self._select("WHERE job_id = ?", job_id) and not self._is_run(job_id):
                return job_id

    def _is_run(self, job_id: str) -> bool:
        return (self._runs_dir / job_id).exists()

    def _by_key(self, key: str) -> tuple[str, str] | None:
        row = self._db.execute(
            "SELECT job_id, digest FROM jobs WHERE idempotency_key = ?", (key,)
        ).fetchone()
        return None if row is None else (str(row[0]), str(row[1]))

    def _fail_unreadable(self) -> None:
        """One such job must not keep the process, and all other jobs, from running."""
        for job_id, document in self._db.execute("SELECT job_id, document FROM jobs").fetchall():
            if isinstance(problem := _read(document), Job):
                continue
            log.error("job_unreadable", job_id=job_id, error=problem)
            self.end(job_id, "failed", problem)

    def _select(self, rest: str, *parameters: object) -> list[StoredJob]:
        query = f"SELECT {_COLUMNS} FROM jobs {rest}"  # noqa: S608  `rest` is ours
        rows = self._db.execute(query, parameters).fetchall()
        return [
            StoredJob(job_id, state, job, *others)
            for job_id, state, document, *others in rows
            if isinstance(job := _read(document), Job)
        ]

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        with writing(self._path):
            self._db.execute(statement, values)


def _digest(job: Job) -> str:
    return blake2b(job.model_dump_json().encode(), digest_size=16).hexdigest()


def _read(document: str) -> Job | str:
    """The job, or why it is none."""
    try:
        return Job.model_validate(json.loads(document))
    except ValidationError as err:
        return f"the stored document is no job: {err}"
