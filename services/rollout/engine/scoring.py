"""Log-probabilities of given tokens, by the prefill path, many sequences at once."""

from collections.abc import Sequence

import numpy as np
import torch

from services.rollout.engine.sampling import token_logprobs
from services.rollout.engine.weights import LoadedVersion
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run


class Scorer:
    """Scores in `slots` of a cache; any version, as nothing of one call is used by the next."""

    def __init__(
        self, model: Sampler, cache: Cache, *, slots: Sequence[int], chunk_tokens: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._slots = slots
        self._chunk_tokens = chunk_tokens

    def score(
        self, sequences: list[np.ndarray], temperature: float, *, version: LoadedVersion
    ) -> list[np.ndarray]:
        """FP32 log-probabilities of tokens 1.. of each sequence."""
        scores: list[np.ndarray] = []
        for first in range(0, len(sequences), len(self._slots)):
            batch = sequences[first : first + len(self._slots)]
            scores += self._score_batch(batch, temperature, version)
        return scores

    def _score_batch(
        self, sequences: list[np.ndarray], temperature: float, version: LoadedVersion
    ) -> list[np.ndarray]:
        pieces: list[list[np.ndarray]] = [[] for _ in sequences]
        longest = max(len(sequence) for sequence in sequences)
        for start in range(0, longest - 1, self._chunk_tokens):
            end = start + self._chunk_tokens
            rows = [i for i, sequence in enumerate(sequences) if len(sequence) - 1 > start]
            # The last token of a sequence predicts nothing that is asked for.
            chunks = [sequences[i][start : min(end, len(sequences[i]) - 1)] for i in rows]
            of_rows = list(zip(rows, chunks, strict=True))
            nexts = [sequences[i][start + 1 : start + 1 + len(chunk)] for i, chunk in of_rows]
            runs = [Run(self._slots[i], start, chunk) for i, chunk in of_rows]
            scores = self.score_runs(runs, np.concatenate(nexts), temperature, version=version)
            sizes = np.cumsum([len(chunk) for chunk in chunks])[:-1]
            for i, piece in zip(rows, np.split(scores, sizes), strict=True):
                pieces[i].append(piece)
        return [np.concatenate(parts) for parts in pieces]

    @torch.inference_mode()
    def score_runs(
        self, runs: list[Run], targets: np.ndarray, temperature: float, *, version: LoadedVersion
    ) -> np.ndarray:
        """Of `targets`, the tokens that follow those of the runs; FP32."""
        step = self._cache.prefill_step(runs)
        hidden = self._model.hidden(version.derived, self._cache, step)[: len(targets)]
        logits = self._model.logits(version.derived, hidden)
        wanted = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
        return token_logprobs(logits, wanted, temperature).cpu().numpy()
