"""From the ranks' weights to a version in the store, with the probe that servers must pass."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from services.trainer.books import Books
from services.trainer.keeper import RankKeeper
from services.trainer.versions import VersionStore
from shared.job_rollout import UpdateSection
from shared.messages import TrainingBatch, TrainingSample
from shared.weights.protocol import Probe, ProbeSequence

PROBE_TEMPERATURE = 1.0
PROBE_NOTE = "probe"
PROMPT_BOUND_FACTOR = 4.0
MAX_PROBE_TOKENS = 128  # of context, and of compared tokens


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """What servers and trainer score alike; the first `num_context` tokens are only read."""

    token_ids: list[int]
    num_context: int = 1


class Exporter:
    def __init__(
        self,
        keeper: RankKeeper,
        store: VersionStore,
        *,
        books: Books,
        update: UpdateSection,
        prompts: Sequence[list[int]],
    ) -> None:
        self._keeper = keeper
        self._store = store
        self._books = books
        self._with_delta = update.delta
        self._num_sequences = update.probe_sequences
        self._max_delta = update.probe_max_mean_abs_delta
        noted = books.read_note(PROBE_NOTE)
        self._is_settled = noted is not None
        self._probe = (
            [ProbeTokens(*one) for one in json.loads(noted)]
            if noted is not None
            else [ProbeTokens(token_ids) for token_ids in prompts]
        )

    def settle_probe(self, batch: TrainingBatch) -> None:
        """From the first batch on the probe is made of sampled responses.

        Before, there are only prompts. Their tokens may be most unlikely ones to a policy, and
        there quantisation alone moves log-probabilities far: the bound is looser.
        """
        if self._is_settled or not self._num_sequences:
            return
        self._probe = probe_tokens(steadiest(batch, self._num_sequences))
        noted = [(one.token_ids, one.num_context) for one in self._probe]
        self._books.keep_note(PROBE_NOTE, json.dumps(noted))
        self._is_settled = True

    async def export(self, version: int) -> None:
        """Write what the ranks hold as `version`."""
        path = await asyncio.to_thread(self._store.fresh_path, version)
        base = self._store.newest_whole() if self._with_delta else None
        await self._keeper.export(version, path, None if base is None else self._store.path(base))
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
        """Score the probe's sequences, once per version; rounded as the servers round, however the
        ranks train: else a server could be off by what quantisation moves, and nobody would see."""
        if not self._probe:
            return
        token_ids = [one.token_ids for one in self._probe]
        scores = await self._keeper.score(
            token_ids, temperature=PROBE_TEMPERATURE, rounding="sampler"
        )
        sequences = [
            ProbeSequence(
                token_ids=one.token_ids, logprobs=logprobs, num_context_tokens=one.num_context
            )
            for one, logprobs in zip(self._probe, scores, strict=True)
        ]
        bound = self._max_delta * (1.0 if self._is_settled else PROMPT_BOUND_FACTOR)
        probe = Probe(sequences=sequences, max_mean_abs_delta=bound)
        self._store.keep_probe(version, probe)


def steadiest(batch: TrainingBatch, number: int) -> list[TrainingSample]:
    """Responses of average length or more without a surprising token, one of a group at most.

    Two honest engines agree best on likely tokens, and broken weights show there at once.
    """
    lengths = [len(sample.sampler_logprobs) for sample in batch.samples]
    usable = [
        sample
        for sample in batch.samples
        if len(sample.sampler_logprobs) >= np.mean(lengths)
        and np.isfinite(sample.sampler_logprobs).all()
    ]
    usable.sort(key=lambda sample: float(sample.sampler_logprobs.min()), reverse=True)
    best_of_groups: dict[str, TrainingSample] = {}
    for sample in usable:
        best_of_groups.setdefault(sample.group_id, sample)
    return list(best_of_groups.values())[:number]


def probe_tokens(samples: Sequence[TrainingSample]) -> list[ProbeTokens]:
    """The end of each prompt and the beginning of its response.

    The last one goes without what all prompts begin with: where a code is rounded otherwise there,
    all sequences that have it move, as they do under an engine that keeps old state.
    """
    prompts = [one.token_ids[: one.num_prompt_tokens].tolist() for one in samples]
    columns = zip(*prompts, strict=False)
    shared = len(list(takewhile(lambda column: len({*column}) == 1, columns)))
    found = []
    for i, one in enumerate(samples):
        num_prompt = one.num_prompt_tokens
        skipped = min(shared, num_prompt - 1) if 0 < i == len(samples) - 1 else 0
        first = max(skipped, num_prompt - MAX_PROBE_TOKENS)
        token_ids = one.token_ids[first : num_prompt + MAX_PROBE_TOKENS].tolist()
        found.append(ProbeTokens(token_ids, num_prompt - first))
    return found
