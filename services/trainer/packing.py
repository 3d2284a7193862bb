"""Samples into micro-batches of padded rows under a token budget. numpy only, deterministic.

A micro-batch is a few slabs, each of rows of one width, so that hardly anything is padding; a row
is one sequence. Ranks that take different sequences get equal work and equally many micro-batches,
because the experts are theirs together. Every response token has a place in one flat array per
batch (samples in order, tokens in order); a micro-batch says which its scored positions are.
"""

# B rows, S padded row length, N scored positions of a micro-batch, R response tokens of the batch
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.models.deepseek_v4.layout import ROW_ALIGNMENT
from shared.routes import TokenRoutes

SLAB_SLACK = 1 / 8  # a row that much shorter than its slab's width gets a slab of its own


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
class Slab:
    """Columns `[first, first + S)` of rows that are `width` long, one sequence each.

    `routes[b]` belongs to row b; None replays none.
    """

    token_ids: np.ndarray  # int64 [B, S]
    routes: tuple[TokenRoutes, ...] | None
    first: int
    width: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`labels[n]` is the token after flat position `positions[n]`, counted slab after slab and row
    after row; its place in the batch's flat response arrays is `places[n]`. All int64.

    A part of a micro-batch scores M of its N positions, those that `scored` numbers, and knows the
    places of all of them.
    """

    slabs: tuple[Slab, ...]
    positions: np.ndarray  # [M]
    labels: np.ndarray  # [M]
    places: np.ndarray  # [N] in [0, R)
    scored: np.ndarray | None = None  # [M]; None: all

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return sum(slab.token_ids.size for slab in self.slabs)


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
        [_fill(sequences, slabs, starts, alignment) for slabs in plan]
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
    slabs, positions, scored = [], [], []
    start = 0
    for slab in micro.slabs:
        length = slab.width // of
        first = rank * length
        row, token = np.divmod(micro.positions - start, slab.width)
        inside = (row >= 0) & (row < len(slab.token_ids)) & (token // length == rank)
        (mine,) = np.nonzero(inside)
        columns = np.ascontiguousarray(slab.token_ids[:, first : first + length])
        slabs.append(Slab(columns, slab.routes, first, slab.width))
        positions.append(start // of + row[mine] * length + token[mine] - first)
        scored.append(mine)
        start += slab.token_ids.size
    numbers = np.concatenate(scored)
    return MicroBatch(
        tuple(slabs), np.concatenate(positions), micro.labels[numbers], micro.places, numbers
    )


@dataclass(slots=True)
class _Planned:
    """A micro-batch that is being filled; its last slab is the narrowest."""

    slabs: list[list[int]]
    width: int
    num_tokens: int

    def cost(self, width: int) -> int:
        return self.width if self._shares(width) else width

    def add(self, index: int, width: int) -> None:
        self.num_tokens += self.cost(width)
        if self._shares(width):
            self.slabs[-1].append(index)
        else:
            self.slabs.append([index])
            self.width = width

    def _shares(self, width: int) -> bool:
        return width >= self.width * (1 - SLAB_SLACK)


def plan_rows(
    lengths: dict[int, int], *, max_tokens: int, alignment: int = ROW_ALIGNMENT
) -> list[list[list[int]]]:
    """Which sequences share a slab, slab by slab, of every micro-batch: longest first, ties by
    index, each into the first micro-batch with room."""
    plan: list[_Planned] = []
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        width = _aligned(lengths[index], alignment)
        if width > max_tokens:
            raise ValueError(
                f"a sequence of {lengths[index]} tokens ({width} padded) exceeds the budget of "
                f"{max_tokens} tokens per micro-batch"
            )
        roomy = (one for one in plan if one.num_tokens + one.cost(width) <= max_tokens)
        planned = next(roomy, None)
        if planned is None:
            plan.append(_Planned([[index]], width, width))
        else:
            planned.add(index, width)
    return [planned.slabs for planned in plan]


def _fill(
    sequences: Sequence[ScoredSequence],
    slabs: list[list[int]],
    starts: np.ndarray,
    alignment: int,
) -> MicroBatch:
    filled, positions, labels, places = [], [], [], []
    start = 0
    for rows in slabs:
        slab = _slab([sequences[index] for index in rows], alignment)
        for row, index in enumerate(rows):
            sequence = sequences[index]
            length, first = len(sequence.token_ids), sequence.num_prompt_tokens
            positions.append(start + row * slab.width + np.arange(first - 1, length - 1))
            labels.append(slab.token_ids[row, first:length])
            places.append(starts[index] + np.arange(sequence.num_scored))
        filled.append(slab)
        start += slab.token_ids.size
    return MicroBatch(
        tuple(filled), np.concatenate(positions), np.concatenate(labels), np.concatenate(places)
    )


def _slab(sequences: Sequence[ScoredSequence], alignment: int) -> Slab:
    width = _aligned(max(len(sequence.token_ids) for sequence in sequences), alignment)
    token_ids = np.zeros((len(sequences), width), np.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    routes = tuple(r for sequence in sequences if (r := sequence.routes) is not None)
    assert len(routes) in (0, len(sequences)), "either all sequences have routes, or none"
    return Slab(token_ids, routes or None, 0, width)


def _idle(alignment: int) -> MicroBatch:
    """One row of nothing, for a rank that must take part while the others still work."""
    nothing = np.zeros(0, np.int64)
    row = Slab(np.zeros((1, alignment), np.int64), None, 0, alignment)
    return MicroBatch((row,), nothing, nothing, nothing)


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
