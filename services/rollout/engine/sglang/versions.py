"""The update transaction on an SGLang server: load, rebuild, flush, prove, label; or go back.

What a server holds after a failed or late call is unknown. It is then loaded with the last good
version again and must score the probe as it did before; if it does not, or is ours and cannot, it
is ended and a fresh one is started from that version. A server may keep copies that it derived from
the old weights (attention sinks at tensor parallel above 1), which no checksum shows, and no probe
if they are small: a class of model that tells of them is asked. It is first to derive them anew;
where they are known to stay a fresh server of the new version follows.
"""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from torch import Tensor

from services.rollout.engine.probing import Proven, next_anchor, prove
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.checkpoint import server_config, write_folder
from services.rollout.engine.sglang.client import ServerRefused
from services.rollout.engine.sglang.dialects import loading, rebuild
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.generation import SAME_SCORES
from services.rollout.engine.sglang.identity import Served, identify
from services.rollout.engine.sglang.limits import Limit
from services.rollout.engine.sglang.restarts import Restarts
from services.rollout.engine.sglang.routes import Tables, tables_of
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import Disk, Transport
from services.rollout.engine.sglang.witness import (
    PrefixKept,
    cache_witness,
    check_forgotten,
    witness_of,
)
from services.rollout.engine.weights import Stopwatch, read_canonical
from shared.errors import DeadlineExceeded, HttpFailed, WeightsCorrupt
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import check_stored
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.models.deepseek_v4.published import published_digests, published_names
from shared.weights.effective import effective_checksum
from shared.weights.manifest import Manifest
from shared.weights.protocol import CommitUpdate, Probe

log = structlog.get_logger()

_FAILURES = (WeightsCorrupt, ServerRefused, HttpFailed, DeadlineExceeded)
FIRST = "first"  # folder of the checkpoint that a server starts with, before any version


@dataclass(frozen=True, slots=True)
class Good:
    """A version that was proven, and the folder that it is loaded from again."""

    policy_version: int
    folder: Path
    checksum: asyncio.Task[str]  # of its effective values: takes longer than the server's load
    tables: Tables  # of its hash layers
    proven: Proven | None = None  # its probe


class Versions:
    """Owns the folders. One transaction at a time."""

    def __init__(
        self,
        engine: SGLangEngine,
        spec: ServerSpec,
        *,
        folder: Path,
        served: Served,
        transport: Transport,
    ) -> None:
        self.engine = engine
        self.good: Good | None = None
        self.restarts = Restarts()
        self._anchor: Proven | None = None  # of the probes
        self._is_whole = True  # what the server holds is `good`
        self._spec = spec
        self._folder, self._served = folder, served
        self.transport = transport

    @property
    def _server(self) -> Server:
        return self.engine.server

    async def activate(
        self, manifest: Manifest, staged: Path, commit: CommitUpdate, *, asked_at_s: float
    ) -> dict[str, Any]:
        """Fields of a CommitResult; WeightsCorrupt with the old version serving.

        The way there takes as long as an update may at the most; the way back has a limit of its
        own, and so has each fresh server (`ServerSpec.longest_update_s`).
        """
        watch = Stopwatch(asked_at_s)
        limit = self._limit(f"version {manifest.policy_version} to be loaded and proven")
        candidate = await self._prepare(manifest, staged)
        watch.lap("load_s")
        try:
            is_abort, limit_s = commit.pause_mode == "abort", limit.left_s()
            async with self.engine.quiet(hand_over=is_abort, limit_s=limit_s):
                watch.lap("pause_s")
                proven = await self._replace(candidate, commit, watch, limit)
                self._serve(proven)
        except BaseException:
            candidate.checksum.cancel()
            shutil.rmtree(candidate.folder, ignore_errors=True)
            raise
        finally:
            if self._is_whole:
                self.engine.open_gate()
            else:
                self.engine.shut_gate()
        watch.lap("resume_s")
        seconds = watch.seconds
        # The server loads and is probed while nothing is sampled.
        seconds["pause_s"] += seconds["restore_s"] + seconds["probe_s"]
        log.info("version_active", policy_version=proven.policy_version, **seconds)
        return {
            "version": proven.policy_version,
            **seconds,
            "proven_in_pause": True,
            "probe_mean_abs_delta": proven.proven and proven.proven.mean_abs_delta,
            "effective_checksum": await asyncio.shield(proven.checksum),  # it is kept
        }

    async def recover(self) -> None:
        """A fresh server of the last good version, after the one we had went away."""
        self.restarts.note()
        self._is_whole = False
        self.engine.shut_gate()
        await self._server.stop()  # calls that hung with it fail now
        await self.engine.close_gate()
        await self._server.start(self.good.folder if self.good else self._folder / FIRST)
        (architecture,) = config_of(self.engine.spec, self._spec)["architectures"]
        self._served = await identify(self._server, architecture=architecture)
        if self.good is not None:
            limit = self._limit(f"version {self.good.policy_version} to serve again")
            async with limit.kept():
                if self._server.is_ours:
                    await self._prove_same(self.good, limit)
                else:  # whoever brought it back did not know this version
                    await self._load_back(self.good, limit)
                await self._label(self.good)
        self._is_whole = True
        self.engine.open_gate()

    async def is_served(self) -> bool:
        """Whether what the server serves still carries the last proven version's name."""
        if not self._is_whole:
            return False
        if self.good is None:
            return True
        try:
            found = await self._server.client.label_served()
        except HttpFailed as err:
            log.warning("sglang_label_unread", error=str(err))
            return False
        return found == str(self.good.policy_version)

    def _limit(self, what: str) -> Limit:
        return Limit.of(what, self._spec.update_deadline_s)

    async def _label(self, version: Good) -> None:
        """Name what was proven; ServerRefused when the name is not taken."""
        client = self._server.client
        await client.label(version.policy_version)
        found = await client.label_served()
        if found != str(version.policy_version):
            raise ServerRefused(f"labelled {version.policy_version}, and {found} is served")

    async def _prepare(self, manifest: Manifest, staged: Path) -> Good:
        """Write the server's folder of a staged version; WeightsCorrupt names what does not fit."""
        arch, threads = self.engine.spec.arch, self.engine.spec.num_threads
        canonical = await asyncio.to_thread(_canonical, arch, manifest, staged)
        folder = self._folder / f"v{manifest.policy_version:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        checksum = asyncio.create_task(
            asyncio.to_thread(checksum_of, arch, canonical, num_threads=threads)
        )
        try:
            config = config_of(self.engine.spec, self._spec)
            await asyncio.to_thread(write_folder, folder, canonical, config)
            return Good(manifest.policy_version, folder, checksum, tables_of(canonical))
        except BaseException:
            checksum.cancel()
            raise

    async def _replace(
        self, candidate: Good, commit: CommitUpdate, watch: Stopwatch, limit: Limit
    ) -> Good:
        """The candidate, proven on the server; the old version is back there if this raises."""
        before: _Before | None = None
        try:
            try:
                async with limit.kept():
                    before = await self._scores_before(candidate, commit.probe, limit)
                    await self._load(candidate.folder, self.transport, limit)
                    watch.lap("restore_s")
                    proven = await self._check(candidate, commit.probe, before, limit)
            except WeightsCorrupt as err:
                proven = await self._heal(candidate, commit.probe, before, err)
            await self._label(proven)
        except WeightsCorrupt:
            raise
        except Exception as err:
            # Whatever it was, the server is half loaded.
            await self._go_back(f"version {candidate.policy_version}: {err!r}")
            raise WeightsCorrupt(f"version {candidate.policy_version}: {err}") from err
        watch.lap("probe_s")
        return proven

    async def _scores_before(
        self, candidate: Good, probe: Probe | None, limit: Limit
    ) -> "_Before | None":
        """What the version that is to be replaced says to the probe, where the two differ."""
        sequences = [] if probe is None else [one.token_ids for one in probe.sequences]
        if not sequences or self.good is None:
            return None
        client = self._server.client
        await client.go_on()  # paused, it would score nothing; the gate lets nobody else in
        scores = await self._scores(sequences, limit)
        page_size = int((await client.info()).get("page_size") or 1)
        most = self.engine.spec.context_length
        witness = witness_of(sequences, page_size=page_size, most=most)
        await cache_witness(client, witness, timeout_s=limit.left_s())
        await client.pause("abort")
        return _Before(scores, witness)

    async def _check(
        self, candidate: Good, probe: Probe | None, before: "_Before | None", limit: Limit
    ) -> Good:
        """The candidate with its proof; WeightsCorrupt when the server kept what is old."""
        if before is None:
            return await self._prove(candidate, probe, limit)
        client, vocab_size = self._server.client, self.engine.spec.arch.vocab_size
        left_s = limit.left_s()
        await check_forgotten(client, before.witness, vocab_size=vocab_size, timeout_s=left_s)
        proven = await self._prove(candidate, probe, limit)
        await self._check_moved(before.scores, proven)
        return proven

    async def _load(self, folder: Path, transport: Transport, limit: Limit) -> None:
        client, is_disk = self._server.client, isinstance(transport, Disk)
        async with loading(client, self._served.dialect, is_disk=is_disk, timeout_s=limit.left_s()):
            await transport.send(client, folder, timeout_s=limit.left_s())
        await client.flush()
        await client.go_on()

    async def _prove(self, version: Good, probe: Probe | None, limit: Limit) -> Good:
        """Score the probe through the server; WeightsCorrupt beyond its bound."""
        await self._served.check_sinks(self._server.client)
        if probe is None or not probe.sequences:
            return version
        scores = await self._scores([one.token_ids for one in probe.sequences], limit)
        proven = prove(version.policy_version, probe, scores, anchor=self._anchor)
        return replace(version, proven=proven)

    async def _check_moved(self, before: list[np.ndarray], candidate: Good) -> None:
        """WeightsCorrupt when other weights score as the old ones did, to the last bit.

        One optimiser step moves log-probabilities by far less than a probe's bound, so that a
        server which said "success" and took nothing would pass it.
        """
        after = [] if candidate.proven is None else candidate.proven.scores
        if not all(np.array_equal(one, two) for one, two in zip(before, after, strict=True)):
            return
        if self.good is not None and await self.good.checksum == await candidate.checksum:
            return  # they are the same weights
        num_tokens = sum(len(one) for one in before)
        raise WeightsCorrupt(
            f"probe: {num_tokens} log-probabilities are to the last bit those of the version before"
        )

    async def _heal(
        self, candidate: Good, probe: Probe | None, before: "_Before | None", err: WeightsCorrupt
    ) -> Good:
        """What is old is derived anew by the server; or a fresh server has the new version, where
        it is known to stay: state at tensor parallel above 1, or prefixes that were to be dropped.
        """
        is_prefix = isinstance(err, PrefixKept)
        if not is_prefix and (proven := await self._rebuilt(candidate, probe, before, err)):
            return proven
        is_known = self._spec.tensor_parallel > 1 or is_prefix
        if not self._server.is_ours or not is_known:
            await self._go_back(str(err))
            raise err
        log.warning("sglang_state_stale", remedy="restart", error=str(err))
        try:
            await self._server.restart(candidate.folder)
            limit = self._limit(f"a fresh server of version {candidate.policy_version} to prove it")
            async with limit.kept():
                return await self._prove(candidate, probe, limit)
        except _FAILURES as again:
            await self._go_back(str(again))
            raise WeightsCorrupt(f"a fresh server, too: {again}") from err

    async def _rebuilt(
        self, candidate: Good, probe: Probe | None, before: "_Before | None", err: WeightsCorrupt
    ) -> Good | None:
        """The candidate, proven once the server derived its copies anew; None if it is not."""
        client = self._server.client
        limit = self._limit(f"copies of version {candidate.policy_version} to be derived anew")
        try:
            async with limit.kept():
                if not await rebuild(client, self._served.dialect, timeout_s=limit.left_s()):
                    return None
                await client.flush()
                proven = await self._check(candidate, probe, before, limit)
        except _FAILURES as again:
            log.info("sglang_rebuild_in_vain", error=str(again))
            return None
        log.warning("sglang_state_stale", remedy="rebuild", error=str(err))
        return proven

    async def _go_back(self, reason: str) -> None:
        """The last good version serves again, loaded or from a fresh server."""
        good = self.good
        log.warning("sglang_goes_back", reason=reason, to=good.policy_version if good else None)
        if good is None:
            return
        self._is_whole = False  # until it is proven to be
        limit = self._limit(f"version {good.policy_version} to be loaded back")
        try:
            async with limit.kept():
                await self._load_back(good, limit)
        except _FAILURES as err:
            log.warning("sglang_restarted", reason=str(err))
            self.restarts.note()
            await self._server.restart(good.folder)
            limit = self._limit(f"a fresh server of version {good.policy_version} to prove it")
            async with limit.kept():
                await self._prove_same(good, limit)
        await self._label(good)
        self._is_whole = True

    async def _load_back(self, good: Good, limit: Limit) -> None:
        """From disk, which needs nothing but the server; or as versions come, where that sees none
        of our folders. WeightsCorrupt unless it scores as it did, or does with copies made anew."""
        await self._load(good.folder, Disk() if self._server.is_here else self.transport, limit)
        try:
            await self._prove_same(good, limit)
        except WeightsCorrupt as err:
            client = self._server.client
            if not await rebuild(client, self._served.dialect, timeout_s=limit.left_s()):
                raise
            await client.flush()
            await self._prove_same(good, limit)
            log.warning("sglang_state_stale", remedy="rebuild", error=str(err))

    async def _prove_same(self, good: Good, limit: Limit) -> None:
        """WeightsCorrupt unless the server scores as it did when this version was proven."""
        await self._served.check_sinks(self._server.client)
        if good.proven is None:
            return
        sequences = [one.token_ids for one in good.proven.probe.sequences]
        found = await self._scores(sequences, limit)
        delta = float(np.abs(np.concatenate(found) - np.concatenate(good.proven.scores)).mean())
        if not delta <= SAME_SCORES:
            raise WeightsCorrupt(
                f"version {good.policy_version} came back with mean |delta log p| {delta:.3g}"
            )

    async def _scores(self, sequences: list[list[int]], limit: Limit) -> list[np.ndarray]:
        """One by one: how a GPU server rounds depends on what it computes in one batch."""
        score = self.engine.score_now
        return [(await score([one], timeout_s=limit.left_s()))[0] for one in sequences]

    def _serve(self, proven: Good) -> None:
        before, self.good = self.good, proven
        self._is_whole = True  # also when the way back had failed before
        self.restarts.forget()
        self._anchor = next_anchor(self._anchor, proven.proven)
        self.engine.policy_version = proven.policy_version
        self.engine.tables = proven.tables
        if before is not None:
            shutil.rmtree(before.folder, ignore_errors=True)


def _canonical(arch: Architecture, manifest: Manifest, staged: Path) -> dict[str, Tensor]:
    canonical = read_canonical(manifest, staged)
    try:
        check_stored(canonical, arch)
    except CheckpointInvalid as err:
        raise WeightsCorrupt(f"version {manifest.policy_version}: {err}") from err
    return canonical


def checksum_of(arch: Architecture, canonical: Mapping[str, Tensor], *, num_threads: int) -> str:
    """Of what is handed over, for the server does not give its weights back."""
    names = published_names(arch)
    return effective_checksum(published_digests(canonical, names, num_threads=num_threads))


@dataclass(frozen=True, slots=True)
class _Before:
    """Said by the version that is replaced: scores of the probe, and a prompt that is cached."""

    scores: list[np.ndarray]
    witness: list[int]


def config_of(engine: EngineSpec, server: ServerSpec) -> dict[str, Any]:
    return server_config(
        engine.arch,
        server.platform,
        context_length=engine.context_length,
        quantise_activations=engine.quantise_activations,
    )
