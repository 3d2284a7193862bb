"""What the publisher knows of one live rollout server."""

import asyncio
import time
from dataclasses import dataclass, field

from shared.registry import Replica

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_DOUBLINGS = 10
REGISTRY_DELAY_S = 3.0  # a record may be this much older than what a commit answered
MAX_REFUSALS = 3  # of one version, by each server, before that is the job's problem


@dataclass(slots=True)
class Server:
    record: Replica
    version: int | None = None
    compared: int | None = None  # the version that it serves with the values expected of it
    said: tuple[int, str] | None = None  # a version, and its effective checksum by this server
    has_departed: bool = False  # from what was published; nobody has confirmed its word since
    updating_to: int | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    failures: int = 0  # in a row
    last_error: str = ""
    retry_at_s: float = 0.0
    _committed_at_s: float = -REGISTRY_DELAY_S
    _refused: tuple[int, int] = (-1, 0)  # a version, and how often in a row

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def is_updating(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def is_quarantined(self) -> bool:
        return time.monotonic() < self.retry_at_s

    def is_same(self, record: Replica) -> bool:
        """Whether the record is of this process, not of one that took its name over."""
        return (self.record.pid, self.record.url) == (record.pid, record.url)

    def serves(self, version: int) -> bool:
        """Whether it serves `version`, with the values that are expected of every server."""
        return self.version == version == self.compared

    def is_going_to(self, version: int) -> bool:
        return self.is_updating and self.updating_to == version and not self.serves(version)

    def has_refused(self, version: int) -> bool:
        refused, times = self._refused
        return refused == version and times >= MAX_REFUSALS

    def forget_refusals(self) -> None:
        """Somebody asks anew: the server gets its chances again, the first at once."""
        self._refused, self.failures, self.retry_at_s = (-1, 0), 0, 0.0

    def look_at(self, record: Replica) -> None:
        """Take over what the registry says, unless a commit's answer is newer."""
        self.record = record
        if time.monotonic() - self._committed_at_s > REGISTRY_DELAY_S:
            self.version = record.policy_version

    def note_said(self, version: int, checksum: str) -> str:
        """What it says of a version; its first word counts until it loads one."""
        if self.said is None or self.said[0] != version:
            self.said = (version, checksum)
        return self.said[1]

    def note_committed(self, version: int) -> None:
        self.version = self.compared = version
        self._committed_at_s = time.monotonic()
        if not self.has_departed:
            self.failures = 0
        self.last_error = ""

    def note_failed(self, version: int, error: str, *, is_refusal: bool) -> float:
        """Quarantine the server, longer each time; for how many seconds."""
        if is_refusal:
            before, times = self._refused
            self._refused = (version, times + 1 if before == version else 1)
        doublings = min(self.failures, MAX_DOUBLINGS)  # 2.0**1024 is no float
        backoff_s = min(FIRST_BACKOFF_S * 2.0**doublings, MAX_BACKOFF_S)
        self.failures += 1
        self.last_error = error
        self.retry_at_s = time.monotonic() + backoff_s
        if self.compared == version:
            self.compared = None
        if self.updating_to == version:
            self.updating_to = None
        return backoff_s

    def describe(self, held_at: int | None) -> str:
        """For people. Example: 'serving 3, held at 3'."""
        if self.is_updating:
            told = f"updating to {self.updating_to}"
        elif self.version is None:
            told = "without weights"
        else:
            told = f"serving {self.version}"
        if held_at is not None:
            told += f", held at {held_at}"
        if self.failures:
            told += f", {self.failures} failed updates, the last: {self.last_error}"
        return told
