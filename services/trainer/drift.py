"""Asks now and then where |Δ log p| comes from: some samples of a batch, before it is trained.

The versions that sampled them are read from the store, and rebuilt there where they are kept as
changes; one that is gone leaves its samples out.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import structlog

from services.trainer.events import EventLog, EventMaker
from services.trainer.keeper import Climbers, RankKeeper
from services.trainer.versions import VersionStore
from shared.errors import WeightsCorrupt
from shared.job_proof import AttributionSection
from shared.messages import TrainingBatch, TrainingSample
from shared.parity.attribution import Attribution, attribute

log = structlog.get_logger()


class NothingToAttribute(ValueError):
    """No sample of the batch can be scored on every rung, or it is trained already."""


class DriftAttribution:
    def __init__(
        self,
        keeper: RankKeeper,
        store: VersionStore,
        *,
        settings: AttributionSection,
        record: EventLog,
        events: EventMaker,
    ) -> None:
        self._keeper, self._store, self._settings = keeper, store, settings
        self._record, self._events = record, events
        self._can = True

    def is_due(self, step: int) -> bool:
        every = self._settings.every_steps
        return self._can and every > 0 and (step - 1) % every == 0

    async def tell(self, batch: TrainingBatch) -> None:
        """Note an event; a job whose ranks cannot say is not asked again."""

        def before(step: int) -> int:
            if step != batch.step - 1:
                raise NothingToAttribute(f"new ranks hold step {step}: the batch is trained")
            return batch.policy_version

        try:
            found = await self.of(batch, held=before)
        except (ValueError, WeightsCorrupt) as err:
            self._can = isinstance(err, NothingToAttribute | WeightsCorrupt)
            log.warning("drift_not_attributed", step=batch.step, error=str(err))
            return
        self._record.note(self._events("drift_attributed", step=batch.step, **fields_of(found)))

    async def of(self, batch: TrainingBatch, *, held: Callable[[int], int]) -> Attribution:
        """Of the batch's first samples; `held` says which version the step held then has made.

        ValueError where the ranks cannot say, `NothingToAttribute` without a sample of a version
        that can be had; WeightsCorrupt where one cannot be rebuilt.
        """
        samples: list[TrainingSample] = []

        async def choose(step: int) -> Climbers:
            nonlocal samples
            await lent.aclose()  # to ranks that were lost
            version = held(step)
            samples = await asyncio.to_thread(self._usable, batch, version)
            others = {one for sample in samples for one in _versions(sample)} - {version}
            folders = await lent.enter_async_context(self._store.lending(others))
            return Climbers(samples, folders)

        async with AsyncExitStack() as lent:
            ladder = await self._keeper.climb(choose, temperature=batch.temperature)
        sampler = np.concatenate([one.sampler_logprobs for one in samples])
        rungs = {name: np.array(values, np.float64) for name, values in ladder.items()}
        return attribute(sampler.astype(np.float64), rungs)

    def _usable(self, batch: TrainingBatch, held: int) -> list[TrainingSample]:
        """The first samples whose versions can all be had."""
        asked = {version for one in batch.samples for version in _versions(one)}
        known = {v for v in asked if v == held or self._store.can_be_had(v)}
        samples = [one for one in batch.samples if _versions(one) <= known]
        samples = [one for one in samples if len(one.sampler_logprobs)][: self._settings.samples]
        if not samples:
            raise NothingToAttribute(
                f"step {batch.step} was sampled by versions {sorted(asked)}, of which none is "
                "stored any more (update.keep_versions, update.keep_bytes)"
            )
        return samples


def fields_of(found: Attribution) -> dict[str, Any]:
    """Of the event, and of the answer over HTTP."""
    return {
        "num_tokens": found.num_tokens,
        "whole": found.whole,
        "parts": found.parts,
        "explained_share": found.explained_share,
    }


def _versions(sample: TrainingSample) -> set[int]:
    return {span.policy_version for span in sample.spans}
