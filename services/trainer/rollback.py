"""The way back to an older version: servers serve it under its own number, training waits.

The ranks hold the current weights, and samples of an older version are too old for them; so no step
begins until the current version is served again. The books remember, for a restart. A version that
no server can serve ends the rollback by itself: the current one is served, and training goes on.
"""

import asyncio

import structlog

from services.trainer.books import Books
from services.trainer.events import EventLog, EventMaker
from services.trainer.publisher import Publisher
from services.trainer.versions import VersionStore
from shared.errors import WeightsCorrupt

log = structlog.get_logger()
NOTE = "rolled_back_to"  # of the books: a version, or empty


class Rollback:
    def __init__(
        self,
        publisher: Publisher,
        store: VersionStore,
        *,
        job_id: str,
        books: Books,
        record: EventLog,
        events: EventMaker,
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._job_id = job_id
        self._books = books
        self._record = record
        self._events = events
        self._ended = asyncio.Event()
        self._ended.set()
        publisher.on_rollback_refused = self._give_up

    @property
    def is_on(self) -> bool:
        return not self._ended.is_set()

    @property
    def doing(self) -> str | None:
        """What servers do instead of sampling for training, and how that ends; None without one."""
        if not self.is_on:
            return None
        current = self._publisher.current
        end = f"`tandem weights rollback {self._job_id} --to {current}` ends it"
        until = "a version is published again" if current is None else end
        version = self._publisher.rolled_back_to
        return f"serving version {version} by a rollback (training waits until {until})"

    @property
    def warnings(self) -> list[str]:
        if not self.is_on:
            return []
        version = self._publisher.rolled_back_to
        return [f"version {version} is served by a rollback: training waits until it is ended"]

    def restore(self) -> None:
        """Take up what an earlier process was asked for; before anything is published."""
        if not (noted := self._books.read_note(NOTE)):
            return
        try:
            self._store.check(int(noted))
        except WeightsCorrupt as err:
            self._note_failed(int(noted), str(err))
        else:
            self._publisher.rolled_back_to = int(noted)
            self._ended.clear()

    async def to(self, version: int) -> None:
        """Have `version` served; the current one ends a rollback.

        LookupError if it is not kept any more, WeightsCorrupt names a file of it that is missing.
        """
        current = self._publisher.current
        if version == current:
            if self.is_on:
                served = self._publisher.rolled_back_to
                await self._serve(None)
                self._note("rollback_ended", served)
            return
        async with self._publisher.tidying:  # what is found is not deleted before it is a target
            # One above it is only being exported: it has no probe yet, publishing it ends nothing.
            kept = [one for one in self._store.versions() if current is None or one <= current]
            if version not in kept:
                raise LookupError(f"version {version} is not kept; kept are {kept}")
            await asyncio.to_thread(self._store.check, version)
            await self._serve(version)
        self._note("rollback_started", version)

    async def _serve(self, target: int | None) -> None:
        self._books.keep_note(NOTE, "" if target is None else str(target))
        if target is not None:
            self._ended.clear()  # first: servers may go there although the call fails
        await self._publisher.roll_back(target)
        if target is None:
            self._ended.set()

    async def _give_up(self, error: str) -> None:
        if (version := self._publisher.rolled_back_to) is not None:
            self._note_failed(version, error)
            await self._serve(None)

    def _note_failed(self, version: int, error: str) -> None:
        self._books.keep_note(NOTE, "")
        self._note("rollback_failed", version, error=error)

    def _note(self, name: str, version: int | None, **more: str) -> None:
        """`version` is the older one."""
        fields = {"policy_version": version, "current_version": self._publisher.current, **more}
        log.warning(name, **fields)
        self._record.note(self._events(name, **fields))

    async def wait(self) -> None:
        """Until the current version is the one to serve."""
        await self._ended.wait()
