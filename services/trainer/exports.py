"""From the ranks' weights to a version in the store, with the probe that servers must pass."""

import asyncio
from collections.abc import Sequence

from services.trainer.keeper import RankKeeper
from services.trainer.versions import VersionStore
from shared.job import UpdateSection
from shared.weights.protocol import Probe, ProbeSequence

PROBE_TEMPERATURE = 1.0


class Exporter:
    def __init__(
        self,
        keeper: RankKeeper,
        store: VersionStore,
        *,
        update: UpdateSection,
        probe_token_ids: Sequence[Sequence[int]],
    ) -> None:
        self._keeper = keeper
        self._store = store
        self._max_delta = update.probe_max_mean_abs_delta
        self._probe_token_ids = [list(token_ids) for token_ids in probe_token_ids]

    async def export(self, version: int) -> None:
        """Write what the ranks hold as `version`."""
        path = await asyncio.to_thread(self._store.fresh_path, version)
        await self._keeper.export(version, path)
        await self._score_probe(version)

    async def make_sure(self, version: int) -> bool:
        """Have `version` in the store, exported now or before.

        False if it was offered before with other weights than the ranks hold: then it must not be
        offered again.
        """
        if self._store.manifest(version) is None:
            await self.export(version)
            return True
        with self._store.scratch() as path:
            await self._keeper.export(version, path)
            if not self._store.same_weights(version, path):
                return False
        if self._store.probe(version) is None:
            await self._score_probe(version)
        return True

    async def _score_probe(self, version: int) -> None:
        """Score the probe's sequences, once per version."""
        if not self._probe_token_ids:
            return
        scores = await self._keeper.score(self._probe_token_ids, temperature=PROBE_TEMPERATURE)
        sequences = [
            ProbeSequence(token_ids=token_ids, logprobs=logprobs)
            for token_ids, logprobs in zip(self._probe_token_ids, scores, strict=True)
        ]
        probe = Probe(sequences=sequences, max_mean_abs_delta=self._max_delta)
        self._store.keep_probe(version, probe)
