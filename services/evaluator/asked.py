"""What people ask the evaluator for, what they are told of it, and both on disk.

`<runs_dir>/_evals/<replica>/<eval_id>.json` is there before a request is answered: a process that
is killed finds what it owed when it is back. A replica reads its own folder only.
"""

import os
import shutil
from pathlib import Path
from typing import Any, Literal, Self

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.evaluator.plan import Policy
from shared.job_eval import SuiteSection

log = structlog.get_logger()

KEPT = 100
FOLDER = "_evals"
REBUILT = ".rebuilt"
State = Literal["queued", "running", "finished", "failed"]


class EvalRequest(SuiteSection):
    """POST /v1/evals."""

    samples_per_problem: int = Field(8, gt=0, le=1024)
    """Completions of each problem."""
    deadline_s: float = Field(600.0, gt=0)
    """Seconds from the start of the evaluation."""
    replica: str | None = None
    """The rollout server to use; null: the first one that serves a version."""
    checkpoint: str | None = None
    """A release directory, or a published version (`runs/<job>/weights/v<version>`), to
    evaluate instead of what a server serves; null: a server's."""
    context_length: int | None = Field(None, gt=1)
    """Tokens of prompt and response together that the checkpoint's sampler has room for; null: what
    the longest prompt and its response need."""
    max_running_requests: int = Field(128, gt=0)
    """Completions that the checkpoint's sampler decodes at the same time."""
    seed: int = Field(0, ge=0)
    """Of the samples; the same request with the same seed gets the same ones."""

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.replica is not None and self.checkpoint is not None:
            raise ValueError("give a replica or a checkpoint, not both")
        return self


class EvalStatus(BaseModel):
    """GET /v1/evals/{id}."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    eval_id: str
    """Its name, `<job>.<evaluation>`."""
    state: State
    """Where it is; the last two are for good."""
    suite: str
    """Name of the suite."""
    replica: str
    """The rollout server that samples; empty for a checkpoint, which gets one of its own."""
    policy_version: int
    """All samples are of this version."""
    problems_done: int = 0
    """Problems whose samples are graded and kept."""
    problems: int
    """Problems in all, without those whose prompt is too long."""
    error: str = ""
    """Why it failed; empty where it did not."""
    result: dict[str, Any] | None = None
    """A free map, the fields of an `eval_finished` event; null until it has finished."""


class Asked(BaseModel):
    """One request with what its plan is made from; `policy` is that of a server's job."""

    model_config = ConfigDict(frozen=True)

    number: int  # rising, in the order of the questions
    request: EvalRequest
    status: EvalStatus
    job_id: str
    stem: str
    policy: Policy | None
    attempts: int = 0  # times that it was begun


class RequestStore:
    """The folder of one replica; at most `KEPT` requests stay, those in progress always."""

    def __init__(self, runs_dir: Path, replica: str) -> None:
        self._folder = runs_dir / FOLDER / replica.replace("/", "_")
        self._known = {one.status.eval_id: one for one in self._read()}
        for left in self._folder.glob(f"*{REBUILT}"):  # by a process that was killed
            shutil.rmtree(left)

    def all(self) -> list[Asked]:
        """Oldest first."""
        return sorted(self._known.values(), key=lambda one: one.number)

    def get(self, eval_id: str) -> Asked | None:
        return self._known.get(eval_id)

    def next_number(self) -> int:
        return 1 + max((one.number for one in self._known.values()), default=0)

    def keep(self, asked: Asked) -> None:
        """On disk when this returns; blocks for one small write."""
        self._known[asked.status.eval_id] = asked
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(asked)
        building = path.with_suffix(".building")
        with building.open("w") as file:
            file.write(asked.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        building.rename(path)
        self._forget_oldest()

    def scratch(self, eval_id: str) -> Path:
        """A folder for what the evaluation rebuilds; whoever makes it removes it."""
        return self._folder / f"{eval_id}{REBUILT}"

    def note_progress(self, eval_id: str, problems_done: int) -> None:
        """In memory alone: the samples themselves say it after a restart."""
        if (asked := self._known.get(eval_id)) is not None:
            asked.status.problems_done = problems_done

    def _forget_oldest(self) -> None:
        ended = [one for one in self.all() if one.status.state in ("finished", "failed")]
        for one in ended[: max(0, len(self._known) - KEPT)]:
            del self._known[one.status.eval_id]
            self._path(one).unlink(missing_ok=True)

    def _path(self, asked: Asked) -> Path:
        return self._folder / f"{asked.status.eval_id}.json"

    def _read(self) -> list[Asked]:
        found = []
        for path in self._folder.glob("*.json"):
            try:
                found.append(Asked.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as err:
                log.warning("request_unreadable", path=str(path), error=str(err))
        return found
