"""One job for people: where it is and what its last step was like."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.jobs.store import StoredJob

LAST = {
    "reward": "reward_raw",
    "reward_trained": "reward_trained",
    "delta_logprob": "delta_logprob_mean",
    "lag": "lag_mean",
    "tokens_per_s": "tokens_per_s",
    "step_seconds": "step_seconds",
}


def job_status(
    job: StoredJob, run_dir: Path, *, doing: str | None, warnings: Sequence[str]
) -> dict[str, Any]:
    """The answer of `GET /v1/jobs/{id}`."""
    return {
        "job_id": job.job_id,
        "name": job.job.name,
        "state": job.state,
        "steps": job.job.steps,
        "created_at_s": job.created_at_s,
        "error": job.error,
        "wish": job.wish,
        "doing": doing if job.state == "running" else None,
        "warnings": [*job.job.warnings, *warnings],
        **_progress(run_dir / BOOKS_FILE),
    }


def _progress(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"step": 0, "policy_version": 0, "counts": {}, "last": {}}
    books = Books(path)
    try:
        made = books.steps(max(1, books.last_step() - 1))  # the newest may not be trained yet
        done = [step for step in made if step.told is not None]
        told: dict[str, Any] = (done[-1].told or {}) if done else {}
        return {
            "step": done[-1].step if done else 0,
            "policy_version": done[-1].policy_version if done else 0,
            "counts": books.counts(),
            "last": {
                name: float(told[field])
                for name, field in LAST.items()
                if told.get(field) is not None
            },
        }
    finally:
        books.close()
