"""Log-probabilities of a recorded completion, computed as they were when it was sampled.

The prompt in the scheduler's chunks, then one token at a time; and where another version took over,
its state anew, as the scheduler makes it after an update. So every sum runs in the order in which
it ran then, and no rounded code flips.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from services.rollout.engine.sampling import token_logprobs
from services.rollout.engine.weights import LoadedVersion
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run, Step
from shared.weights.protocol import PauseMode

Span = tuple[int, int]
"""A version, and how many tokens it sampled."""


class Resampler:
    """One completion at a time, in a cache of its own."""

    def __init__(self, model: Sampler, *, max_tokens: int, chunk_tokens: int) -> None:
        self._model = model
        self._cache = Cache(model.arch, num_slots=1, max_tokens=max_tokens)
        self._chunk_tokens = chunk_tokens

    def score(
        self,
        token_ids: np.ndarray,
        spans: Sequence[Span],
        *,
        temperature: float,
        load: Callable[[int], LoadedVersion],
        pause_mode: PauseMode = "in_place",
    ) -> np.ndarray:
        """FP32 log-probabilities of the tokens of `spans`, which are the last of `token_ids`."""
        first = end = len(token_ids) - sum(num for _, num in spans)
        rows: list[Tensor] = []
        for policy_version, num in spans:
            version = load(policy_version)
            if end == first:
                rows.append(self._prefill(version, token_ids[:end], (0,)))
                end, num = end + 1, num - 1
            else:
                # A completion that gave up its slot gets a copy of its prompt's state, and what
                # comes after the prompt is computed from there.
                starts = (0,) if pause_mode == "in_place" else (0, first)
                self._prefill(version, token_ids[: end - 1], starts)
            rows += [self._decode(version, token_ids, at) for at in range(end - 1, end - 1 + num)]
            end += num
        wanted = torch.from_numpy(token_ids[first:].astype(np.int64))
        scores = [
            token_logprobs(row, token, temperature)
            for row, token in zip(rows, wanted.split(1), strict=True)
        ]
        return torch.cat(scores).cpu().numpy()

    def _prefill(
        self, version: LoadedVersion, token_ids: np.ndarray, starts: Sequence[int]
    ) -> Tensor:
        """In chunks from each of `starts`; logits [1, V] after the last token."""
        edges: list[int] = []
        for start, stop in zip(starts, (*starts[1:], len(token_ids)), strict=True):
            edges += range(start, stop, self._chunk_tokens)
        for start, stop in zip(edges, (*edges[1:], len(token_ids)), strict=True):
            logits = self._logits(
                version, self._cache.prefill_step([Run(0, start, token_ids[start:stop])])
            )
        return logits

    def _decode(self, version: LoadedVersion, token_ids: np.ndarray, position: int) -> Tensor:
        """Logits [1, V] after the token at `position`."""
        slots, positions = np.zeros(1, np.int64), np.array([position])
        inputs = token_ids[positions].astype(np.int64)
        return self._logits(version, self._cache.decode_step(slots, positions, inputs))

    @torch.inference_mode()
    def _logits(self, version: LoadedVersion, step: Step) -> Tensor:
        hidden = self._model.hidden(version.derived, self._cache, step)
        last = step.num_tokens - 1
        return self._model.logits(version.derived, hidden[last : last + 1])
