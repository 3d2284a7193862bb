"""The way back to an older version: servers serve it under its own number, training waits.

The ranks hold the current weights, and samples of an older version are too old for them; so no step
begins until the current version is served again. The books remember, for a restart.
"""

import asyncio

import structlog

from services.trainer.books import Books
from services.trainer.events import EventLog, EventMaker
from services.trainer.publisher import Publisher
from services.trainer.versions import VersionStore

log = structlog.get_logger()
NOTE = "rolled_back_to"  # of the books: a version, or empty


class Rollback:
    def __init__(
        self,
        publisher: Publisher,
        store: VersionStore,
        *,
        books: Books,
        record: EventLog,
        events: EventMaker,
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._books = books
        self._record = record
        self._events = events
        self._ended = asyncio.Event()
        self._ended.set()

    @property
    def is_on(self) -> bool:
        return not self._ended.is_set()

    def restore(self) -> None:
        """Take up what an earlier process was asked for; before anything is published."""
        if noted := self._books.read_note(NOTE):
            self._publisher.rolled_back_to = int(noted)
            self._ended.clear()

    async def to(self, version: int) -> None:
        """Have `version` served; the current one ends a rollback.

        LookupError if it cannot be had any more.
        """
        current, kept = self._publisher.current, self._store.versions()
        if version != current and version not in kept:
            raise LookupError(f"version {version} is not kept; kept are {kept}")
        target = None if version == current else version
        self._books.keep_note(NOTE, "" if target is None else str(target))
        await self._publisher.roll_back(target)
        if target is None:
            self._ended.set()
        else:
            self._ended.clear()
        log.warning("rolled_back", policy_version=version, current=current)
        fields = {"policy_version": version, "current_version": current}
        self._record.note(self._events("rolled_back", **fields))

    async def wait(self) -> None:
        """Until the current version is the one to serve."""
        await self._ended.wait()
