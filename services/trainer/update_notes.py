"""What is told of servers and their updates: events, metrics, the log."""

import time
from collections.abc import Callable

import structlog

from services.trainer.events import EventLog, EventMaker
from services.trainer.stopwatch import Stopwatch
from shared.telemetry import counter, now_s
from shared.weights.manifest import Manifest
from shared.weights.protocol import BeginUpdate, CommitResult, UpdateStatus

log = structlog.get_logger()


class UpdateNotes:
    def __init__(
        self, record: EventLog, events: EventMaker, *, num_servers: Callable[[], int]
    ) -> None:
        self._record = record
        self._events = events
        self._num_servers = num_servers
        outcomes = ("committed", "failed")
        self._updates = counter("trainer_updates_total", "Weight updates.", ("outcome",), outcomes)
        self._announced: tuple[int, float] | None = None  # a version no server serves yet, since

    def announced(self, version: int) -> None:
        """Servers are to serve it from now on."""
        self._announced = (version, time.monotonic())

    def committed(
        self,
        server: str,
        begin: BeginUpdate,
        staged: UpdateStatus,
        watch: Stopwatch,
        result: CommitResult,
    ) -> None:
        """One server serves a version."""
        manifest = begin.manifest
        self._updates.labels("committed").inc()
        pulled = counter("trainer_update_bytes_total", "That servers pulled.", ("kind",))
        pulled.labels("full" if begin.base_version is None else "delta").inc(staged.pulled_bytes)
        self._record.note(
            self._events(
                "update_committed",
                server=server,
                policy_version=manifest.policy_version,
                base_version=begin.base_version,
                is_rollback=begin.is_rollback,
                bytes=manifest.num_bytes,
                pulled_bytes=staged.pulled_bytes,
                rebuilt_shards=staged.rebuilt_shards,
                num_shards=len(manifest.shards),
                began_at_s=now_s() - watch.total_s,
                seconds=watch.total_s,
                **watch.parts,
                **result.model_dump(exclude={"version"}),
            )
        )
        self._published(manifest)

    def failed(self, server: str, version: int, error: str, *, retry_in_s: float) -> None:
        """One server serves on what it did."""
        self._updates.labels("failed").inc()
        what = {"server": server, "policy_version": version, "error": error}
        log.warning("update_failed", **what)
        self._record.note(self._events("update_failed", **what, retry_in_s=retry_in_s))

    def not_started(self, server: str, error: str, *, gave_up: bool) -> None:
        """One server has no engine for the job."""
        what = {"server": server, "error": error, "gave_up": gave_up}
        log.warning("engine_not_started", **what)
        self._record.note(self._events("engine_not_started", **what))

    def _published(self, manifest: Manifest) -> None:
        """Told once per version: when its first server serves it."""
        version = manifest.policy_version
        if self._announced is None or self._announced[0] != version:
            return
        seconds = time.monotonic() - self._announced[1]
        self._announced = None
        self._record.note(
            self._events(
                "weights_published",
                policy_version=version,
                bytes=manifest.num_bytes,
                seconds=seconds,
                servers=self._num_servers(),
            )
        )
