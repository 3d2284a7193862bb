"""Takes one server to one version: begin, stage, commit.

The first commit of a version goes alone (the canary), and who refuses it is asked again before any
other: a version that fails its probe reaches one server. Its effective checksum is noted, and a
server counts as serving the version once it has said the same. Where one says otherwise, neither is
believed: what was published decides, and whoever departs from that does not serve the version.
"""

import asyncio
import os
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from services.trainer.arbiter import Arbiter, Undecided
from services.trainer.canary import Canary, LeftToCanary
from services.trainer.fanout import Fanout
from services.trainer.rounds import Rounds
from services.trainer.servers import Server
from services.trainer.stopwatch import Stopwatch
from services.trainer.transactions import Transaction, UpdateFailed, ValuesDiffer, is_refusal
from services.trainer.update_notes import UpdateNotes
from services.trainer.versions import VersionStore
from shared.errors import DeadlineExceeded, HttpFailed, TandemError, WeightsCorrupt
from shared.http import HttpClient
from shared.job_rollout import UpdateSection
from shared.registry import Replica, register
from shared.weights.manifest import Manifest
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, Probe


class Delivery:
    """`probe(version)` is what a server must pass; `on_moved` hears of whoever ended an update;
    `servers` are the live ones."""

    def __init__(
        self,
        redis: Redis,
        *,
        job_id: str,
        store: VersionStore,
        update: UpdateSection,
        http: HttpClient,
        fanout: Fanout,
        canary: Canary | None,
        rounds: Rounds | None,
        arbiter: Arbiter,
        servers: Callable[[], Iterable[Server]],
        owners: Callable[[], list[str]],
        probe: Callable[[int], Probe | None],
        notes: UpdateNotes,
        on_moved: Callable[[], None],
        max_parallel: int,
    ) -> None:
        self._redis = redis
        self._job_id = job_id
        self._store = store
        self._update = update
        self._http = http
        self._fanout = fanout
        self._canary = canary
        self._rounds = rounds
        self._arbiter = arbiter
        self._servers = servers
        self._owners = owners
        self._probe = probe
        self._notes = notes
        self._on_moved = on_moved
        self._slots = asyncio.Semaphore(max_parallel)

    async def bring(self, server: Server, version: int) -> None:
        """One transaction; whatever goes wrong, the server is left on what it serves."""
        deadline_s = self._update.deadline_s
        update = Transaction(self._http, server_url=server.record.url, deadline_s=deadline_s)
        try:
            try:
                async with self._slots:
                    await self._bring(update, server, version)
            except ValuesDiffer as err:
                await self._judge(server, version, err)  # the ranks may be in a step: in no slot
        except LeftToCanary:
            await update.abort(version)  # what was staged stays there for the next time
            self._let_go(server)
        except (HttpFailed, UpdateFailed, DeadlineExceeded, WeightsCorrupt, Undecided) as err:
            self._fanout.note_failed(version, server.name)
            self._note_failed(server, version, err)
            await update.abort(version)

    async def _bring(self, update: Transaction, server: Server, version: int) -> None:
        if not self._store.is_whole(version):
            await asyncio.to_thread(self._store.restore, version)
        manifest = self._store.manifest(version)
        if manifest is None:
            return  # deleted meanwhile: it is no target any more
        if await update.serves_already(self._job_id, version):
            await self._commit(update, server, version, loads=False)
            self._note_served(server, version)
            return
        watch = Stopwatch(f"update {server.name}")
        begin = await self._begin(server, manifest)
        with watch.part("stage_s"):
            staged = await update.stage(begin)
        loads = staged.state != "active"  # it may have ended a commit that was given up as late
        with watch.part("commit_s"):
            result = await self._commit(update, server, version, loads=loads)
        self._fanout.note_served(version, server.name)
        self._note_served(server, version)
        self._notes.committed(server.name, begin, staged, watch, result)

    async def _judge(self, server: Server, version: int, differs: ValuesDiffer) -> None:
        """Whoever departs from what was published is quarantined, the others are asked again."""
        try:
            word = await self._arbiter.word(version)
        except Undecided as err:
            raise Undecided(f"{differs}; {err}") from err
        for other in self._servers():
            if other.compared == version and other.said is not None and other.said[1] != word:
                self._note_failed(other, version, _departs(version, other.said[1], word))
        if differs.said is not None and differs.said != word:
            raise _departs(version, differs.said, word)
        if differs.said is None and differs.expected == word:
            raise ValuesDiffer(f"{differs}; so was published", said=None, expected=word)
        self._let_go(server)

    def _let_go(self, server: Server) -> None:
        """Nothing speaks against it: it is asked again at once."""
        server.updating_to = None
        self._on_moved()

    async def _begin(self, server: Server, manifest: Manifest) -> BeginUpdate:
        """As changes if the server has what they are changes of."""
        version, served = manifest.policy_version, server.version
        as_changes = manifest.delta is not None and manifest.delta.base_version == served
        url, group = server.record.shards_url, None
        if self._rounds is not None and not as_changes:
            group = await self._rounds.join(version, server.name, num_owners=manifest.num_parts)
        owners = await self._registered_owners(manifest)
        return BeginUpdate(
            job_id=self._job_id,
            version=version,
            base_version=served if as_changes else None,
            manifest=manifest if as_changes else manifest.without_delta(),
            sources=self._fanout.sources(
                version, server.name, url, as_changes=as_changes, has_owners=bool(owners)
            ),
            owners=owners,
            group=group,
            is_rollback=served is not None and served > version,
        )

    async def _registered_owners(self, manifest: Manifest) -> list[str]:
        """Where the ranks serve their parts; servers pull from registered peers only."""
        urls = self._owners()
        if len(urls) < manifest.num_parts or manifest.num_parts == 1:
            return []
        for part, url in enumerate(urls):
            name = f"{self._job_id}-rank-{part}"
            record = Replica(
                service="trainer",
                name=name,
                url=url,
                pid=os.getpid(),
                job_id=self._job_id,
                state="serving",
                shards_url=url,
            )
            await register(self._redis, record)
        return urls

    async def _commit(
        self, update: Transaction, server: Server, version: int, *, loads: bool
    ) -> CommitResult:
        """Activate. As long as no server has accepted the version the canary tries it alone.

        A server that serves it already, as after an answer that was lost, `loads` nothing and only
        says what it has.
        """
        if self._canary and self._store.effective(version) is None:
            async with self._canary.turn(version, server.name, loads=loads):
                if self._store.effective(version) is None:
                    return await self._commit_now(update, server, version, loads=loads)
        return await self._commit_now(update, server, version, loads=loads)

    async def _commit_now(
        self, update: Transaction, server: Server, version: int, *, loads: bool
    ) -> CommitResult:
        """Every server must come to the effective checksum of the first, or of what was published.

        One that serves the version already would begin anew for another that is expected: it is
        told none that only a server has said.
        """
        store = self._store
        commit = CommitUpdate(
            pause_mode=self._update.pause_mode,
            probe=self._probe(version),
            effective_checksum=store.expected(version) if loads else store.settled(version),
        )
        if loads:
            server.said = None  # though this answer may be lost
        result = await update.commit(version, commit)
        said = server.note_said(version, result.effective_checksum)
        expected = store.expected(version)  # without a canary another may have come first
        if expected is not None and expected != said:
            text = f"effective checksum {said} of version {version}, expected was {expected}"
            raise ValuesDiffer(text, said=said, expected=expected)
        if store.effective(version) is None:
            store.keep_effective(version, said)
        server.has_departed &= expected is None
        return result

    def _note_served(self, server: Server, version: int) -> None:
        server.note_committed(version)
        self._on_moved()

    def _note_failed(self, server: Server, version: int, err: TandemError) -> None:
        backoff_s = server.note_failed(version, str(err), is_refusal=is_refusal(err))
        departs = isinstance(err, ValuesDiffer)
        server.has_departed |= departs
        if self._canary and (departs or not is_refusal(err)):
            self._canary.forget_server(server.name)
        self._on_moved()
        self._notes.failed(server.name, version, str(err), retry_in_s=backoff_s)


def _departs(version: int, said: str, word: str) -> ValuesDiffer:
    text = f"its effective checksum of version {version} is {said}, what was published has {word}"
    return ValuesDiffer(f"says {text}", said=said, expected=word)
