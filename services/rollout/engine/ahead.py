"""State of running completions under a candidate, computed while the old version samples.

    step boundary: look at the running ──> thread: compute what is new of them ──┐ again, while
         ^                                                                       │ that was much
         └───────────────────────────────────────────────────────────────────────┘
    switch ──> the state of each that still runs is taken over; the few tokens since are computed

It lies in a cache of its own, so that nothing which is served is touched before the switch. Without
this every running completion would stand still until all its tokens are computed anew.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from services.rollout.engine.scheduler import Scheduler
from services.rollout.engine.weights import LoadedVersion
from services.rollout.models.deepseek_v4_cache import Cache, Run

FEW_TOKENS = 4  # of each completion: not worth another round
MAX_ROUNDS = 4
_BATCH_TOKENS = 512  # computed at once: the old version samples in between


@dataclass(slots=True)
class Ahead:
    """Rows are the slots of running completions. `look` and `take_over` belong to the loop that
    steps the scheduler, `compute` may run in a thread beside it."""

    scheduler: Scheduler
    version: LoadedVersion
    rounds: int = 0
    _cache: Cache | None = None
    _known: dict[int, np.ndarray] = field(default_factory=dict)  # slot: tokens that are computed
    _wanted: dict[int, np.ndarray] = field(default_factory=dict)  # slot: tokens to be

    def look(self) -> bool:
        """Whether there is enough to compute; what the completions are at is noted."""
        self._wanted = self.scheduler.running_tokens()
        missing = sum(len(ids) - self._num_known(slot, ids) for slot, ids in self._wanted.items())
        return missing > FEW_TOKENS * len(self._wanted) and self.rounds < MAX_ROUNDS

    @torch.inference_mode()
    def compute(self) -> None:
        """Everything that was noted and is not there."""
        self.rounds += 1
        if self._cache is None:
            self._cache = self.scheduler.new_cache(max(self._wanted) + 1)
        runs = [
            Run(slot, start, ids[start:])
            for slot, ids in self._wanted.items()
            if (start := self._num_known(slot, ids)) < len(ids)
        ]
        for batch in _batches(runs):
            step = self._cache.prefill_step(batch)
            self.scheduler.model.hidden(self.version.derived, self._cache, step)
        self._known |= self._wanted

    def take_over(self) -> None:
        """After the switch: what still runs goes on from here."""
        if self._cache is not None:
            running = self.scheduler.running_tokens()
            done = {
                slot: num for slot, ids in running.items() if (num := self._num_known(slot, ids))
            }
            self.scheduler.adopt(self._cache, done)

    def _num_known(self, slot: int, ids: np.ndarray) -> int:
        """0 for another completion, which has taken the slot."""
        known = self._known.get(slot)
        if known is None or not np.array_equal(known, ids[: len(known)]):
            return 0
        return len(known)


def _batches(runs: list[Run]) -> list[list[Run]]:
    batches: list[list[Run]] = []
    room = 0
    for run in runs:
        if (room := room - len(run.token_ids)) < 0:
            batches.append([])
            room = _BATCH_TOKENS - len(run.token_ids)
        batches[-1].append(run)
    return batches
