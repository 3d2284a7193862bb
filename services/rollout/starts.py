"""How often an engine that does not start is tried again: a few times, each later than the last."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Starts:
    """Of one job at a time; another job, or the same one after it was away, begins anew."""

    first_wait_s: float
    most: int
    job_id: str | None = None
    failures: int = 0
    reason: str = ""
    _retry_at_s: float = 0.0

    @property
    def gave_up(self) -> bool:
        return self.failures >= self.most

    def may_try(self, job_id: str) -> bool:
        """Whether it is time; also what was noted of another job is forgotten."""
        if job_id != self.job_id:
            self.forget()
            self.job_id = job_id
        return not self.gave_up and time.monotonic() >= self._retry_at_s

    def note_failed(self, reason: str) -> None:
        wait_s = self.first_wait_s * 2.0**self.failures
        self.failures += 1
        self.reason = reason
        self._retry_at_s = time.monotonic() + wait_s

    def forget(self) -> None:
        self.job_id, self.failures, self.reason, self._retry_at_s = None, 0, "", 0.0

    def describe(self) -> str:
        """For people. Example: 'the engine did not start in 2 of 5 tries so far: no such file'."""
        told = "and is not tried again" if self.gave_up else "so far"
        tries = f"{self.failures} of {self.most} tries {told}"
        return f"the engine did not start in {tries}: {self.reason}"
