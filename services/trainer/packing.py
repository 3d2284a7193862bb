"""Samples into micro-batches of right-padded rows under a token budget. numpy only, deterministic.

Every response token has a place in one flat array per batch (samples in order, tokens in order);
a micro-batch says which places its scored positions are, so that nothing else must be sorted.
"""

# B rows, S padded row length, N scored positions of a micro-batch, R response tokens of the batch
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.routes import TokenRoutes

ALIGNMENT = 8  # row lengths are multiples of this, so that few distinct shapes occur


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Token ids `[T]` of which those from `num_prompt_tokens` on are scored."""

    token_ids: np.ndarray
    num_prompt_tokens: int
    routes: TokenRoutes | None = None  # of the T - 1 inputs, to be replayed

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`labels[n]` is the token after flat position `positions[n]`; its place in the batch's flat
    response arrays is `places[n]`. All int64. `routes[b]` belongs to row b; None replays none."""

    token_ids: np.ndarray  # [B, S]
    positions: np.ndarray  # [N] row · S + token
    labels: np.ndarray  # [N]
    places: np.ndarray  # [N] in [0, R)
    routes: tuple[TokenRoutes, ...] | None = None


def pack(
    sequences: Sequence[ScoredSequence], *, max_tokens: int, alignment: int = ALIGNMENT
) -> list[MicroBatch]:
    """Cover every sequence that has something to score, longest first, at most `max_tokens` padded
    tokens a micro-batch. ValueError for a sequence that no micro-batch can hold."""
    starts = np.cumsum([0, *(sequence.num_scored for sequence in sequences)])
    scored = [i for i, sequence in enumerate(sequences) if sequence.num_scored > 0]
    lengths = {i: len(sequences[i].token_ids) for i in scored}
    plan = plan_rows(lengths, max_tokens=max_tokens, alignment=alignment)
    return [_fill(sequences, rows, starts, alignment) for rows in plan]


def plan_rows(
    lengths: dict[int, int], *, max_tokens: int, alignment: int = ALIGNMENT
) -> list[list[int]]:
    """Which sequences share a micro-batch: longest first, ties by index, as full as it goes."""
    plan: list[list[int]] = []
    width = 0
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        if not plan or (len(plan[-1]) + 1) * width > max_tokens:
            width = _aligned(lengths[index], alignment)
            if width > max_tokens:
                raise ValueError(
                    f"a sequence of {lengths[index]} tokens ({width} padded) exceeds the budget of "
                    f"{max_tokens} tokens per micro-batch"
                )
            plan.append([])
        plan[-1].append(index)
    return plan


def _fill(
    sequences: Sequence[ScoredSequence], rows: list[int], starts: np.ndarray, alignment: int
) -> MicroBatch:
    width = _aligned(max(len(sequences[i].token_ids) for i in rows), alignment)
    token_ids = np.zeros((len(rows), width), np.int64)
    positions, labels, places = [], [], []
    for row, index in enumerate(rows):
        sequence = sequences[index]
        length, first = len(sequence.token_ids), sequence.num_prompt_tokens
        token_ids[row, :length] = sequence.token_ids
        positions.append(row * width + np.arange(first - 1, length - 1))
        labels.append(token_ids[row, first:length])
        places.append(starts[index] + np.arange(sequence.num_scored))
    routes = tuple(r for index in rows if (r := sequences[index].routes) is not None)
    assert len(routes) in (0, len(rows)), "either all sequences have routes, or none"
    return MicroBatch(
        token_ids,
        np.concatenate(positions),
        np.concatenate(labels),
        np.concatenate(places),
        routes or None,
    )


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
