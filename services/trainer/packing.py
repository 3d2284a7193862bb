"""Samples into micro-batches of right-padded rows under a token budget. numpy only, deterministic.

Ranks that take different sequences get equal work and equally many micro-batches, because the
experts are theirs together. Every response token has a place in one flat array per batch (samples
in order, tokens in order); a micro-batch says which places its scored positions are, so that
nothing else must be sorted.
"""

# B rows, S padded row length, N scored positions of a micro-batch, R response tokens of the batch
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.models.deepseek_v4.layout import ROW_ALIGNMENT
from shared.routes import TokenRoutes


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
    response arrays is `places[n]`. All int64. `routes[b]` belongs to row b; None replays none.

    A part of a micro-batch has some columns of its rows, scores M of its positions, and knows the
    places of all of them.
    """

    token_ids: np.ndarray  # [B, S]
    positions: np.ndarray  # [M] row · S + token
    labels: np.ndarray  # [M]
    places: np.ndarray  # [N] in [0, R)
    routes: tuple[TokenRoutes, ...] | None = None
    part: "Part | None" = None


@dataclass(frozen=True, slots=True)
class Part:
    """Columns `[first, first + S)` of rows of `width`; position m is the `scored[m]`-th of all."""

    first: int
    width: int
    scored: np.ndarray  # int64 [M]


def pack(
    sequences: Sequence[ScoredSequence],
    *,
    max_tokens: int,
    alignment: int = ROW_ALIGNMENT,
    num_ranks: int = 1,
) -> list[list[MicroBatch]]:
    """For each of `num_ranks` its micro-batches; together they cover every sequence that has
    something to score, longest first, at most `max_tokens` padded tokens a micro-batch.

    ValueError for a sequence that no micro-batch can hold.
    """
    starts = np.cumsum([0, *(sequence.num_scored for sequence in sequences)])
    scored = [i for i, sequence in enumerate(sequences) if sequence.num_scored > 0]
    lengths = {i: len(sequences[i].token_ids) for i in scored}
    plans = [
        plan_rows(mine, max_tokens=max_tokens, alignment=alignment)
        for mine in share_out(lengths, num_ranks=num_ranks, alignment=alignment)
    ]
    rounds = max(len(plan) for plan in plans)
    return [
        [_fill(sequences, rows, starts, alignment) for rows in plan]
        + [_idle(alignment)] * (rounds - len(plan))
        for plan in plans
    ]


def num_guessed(sequences: Sequence[ScoredSequence], depths: int) -> int:
    """Scored tokens that MTP blocks guess, once a block: block k needs k + 2 tokens before it."""
    return sum(
        max(0, len(one.token_ids) - max(one.num_prompt_tokens, depth + 2))
        for one in sequences
        for depth in range(depths)
    )


def share_out(
    lengths: dict[int, int], *, num_ranks: int, alignment: int = ROW_ALIGNMENT
) -> list[dict[int, int]]:
    """Which sequences each rank takes: the longest one left goes to the rank with the least work.

    Work is padded tokens: attention sees a window and a few entries, so it grows with them.
    """
    shares: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    least = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        work, rank = heapq.heappop(least)
        shares[rank][index] = lengths[index]
        heapq.heappush(least, (work + _aligned(lengths[index], alignment), rank))
    return shares


def context_part(micro: MicroBatch, rank: int, of: int) -> MicroBatch:
    """What the `rank`-th of `of` context-parallel ranks holds: equal consecutive parts of rows."""
    if of == 1:
        return micro
    width = micro.token_ids.shape[1]
    length, first = width // of, rank * (width // of)
    row, token = np.divmod(micro.positions, width)
    scored = np.flatnonzero(token // length == rank)
    return MicroBatch(
        np.ascontiguousarray(micro.token_ids[:, first : first + length]),
        (row * length + token - first)[scored],
        micro.labels[scored],
        micro.places,
        micro.routes,
        Part(first, width, scored),
    )


def plan_rows(
    lengths: dict[int, int], *, max_tokens: int, alignment: int = ROW_ALIGNMENT
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


def _idle(alignment: int) -> MicroBatch:
    """One row of nothing, for a rank that must take part while the others still work."""
    nothing = np.zeros(0, np.int64)
    return MicroBatch(np.zeros((1, alignment), np.int64), nothing, nothing, nothing)


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
