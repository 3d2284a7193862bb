"""What was chosen at each token of what is in the engine: rows beside those of the slot table.

A token keeps the choices under which the token after it was sampled. So a state that is computed
anew, by later weights, records nothing: only prompts and decoding do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.rollout.models.deepseek_v4 import Choices
from services.rollout.models.deepseek_v4_cache import Run
from shared.models.deepseek_v4.architecture import Architecture
from shared.routes import (
    TokenRoutes,
    expert_dtype,
    first_selecting_token,
    indexed_layers,
    num_entry_bytes,
    pack_bits,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """Which choices an engine keeps."""

    experts: bool = False
    entries: bool = False

    @property
    def on(self) -> bool:
        return self.experts or self.entries


class RouteTable:
    """Arrays of `num_rows` rows of `max_tokens`; nothing is held of what is not recorded."""

    def __init__(
        self, arch: Architecture, recording: Recording, *, num_rows: int, max_tokens: int
    ) -> None:
        self._first = first_selecting_token(arch)
        self._num_indexed = len(indexed_layers(arch))
        self._experts: np.ndarray | None = None
        self._bits: np.ndarray | None = None
        if recording.experts:
            shape = (num_rows, max_tokens, arch.num_hidden_layers, arch.num_experts_per_tok)
            self._experts = np.zeros(shape, expert_dtype(arch))
        if recording.entries:
            num_bytes = num_entry_bytes(max_tokens)
            self._bits = np.zeros((num_rows, max_tokens, self._num_indexed, num_bytes), np.uint8)

    def put(
        self, rows: np.ndarray, positions: np.ndarray, choices: Choices, *, first: int = 0
    ) -> None:
        """The choices of a step whose tokens from number `first` on are at `positions` of `rows`.

        Both are int64 [n]; further tokens of the step are padding.
        """
        tokens = slice(first, first + len(rows))
        if self._experts is not None:
            ids = torch.stack(choices.experts, 1)[tokens]
            self._experts[rows, positions] = ids.cpu().numpy()
        if self._bits is None:
            return
        self._bits[rows, positions] = 0
        if choices.entries:
            kept = torch.stack(choices.entries, 1)[tokens].cpu().numpy()
            # Until an indexer has to select, there is nothing to record.
            kept[positions < self._first] = False
            self._bits[rows, positions] = pack_bits(kept, self._bits.shape[-1])

    def put_runs(self, runs: Sequence[Run], choices: Choices, *, first: int) -> None:
        """Likewise of consecutive runs, of which the first begins at token `first` of the step."""
        rows = np.repeat([run.slot for run in runs], [len(run.token_ids) for run in runs])
        positions = [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
        self.put(rows, np.concatenate(positions), choices, first=first)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        for array in (self._experts, self._bits):
            if array is not None:
                array[target, :num_tokens] = array[source, :num_tokens]

    def take(self, row: int, num_tokens: int) -> TokenRoutes:
        """A copy of the first `num_tokens` of a row."""
        experts = bits = None
        if self._experts is not None:
            experts = self._experts[row, :num_tokens].copy()
        if self._bits is not None:
            bits = self._bits[row, :num_tokens, :, : num_entry_bytes(num_tokens)].copy()
        return TokenRoutes(experts, bits)

    def give(self, row: int, routes: TokenRoutes) -> None:
        """Put back what was taken."""
        if self._experts is not None:
            assert routes.expert_ids is not None
            self._experts[row, : routes.num_tokens] = routes.expert_ids
        if self._bits is not None:
            assert routes.entry_bits is not None
            width = routes.entry_bits.shape[-1]
            self._bits[row, : routes.num_tokens] = 0
            self._bits[row, : routes.num_tokens, :, :width] = routes.entry_bits
