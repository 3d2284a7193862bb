"""Flipped code or mistake? Between sides that round activations a sum in another order flips a
code now and then; a point is at fault only when more of its rows depart than flips explain.

Rows that a departure upstream reaches are not counted, however many they are: one flipped key is
seen by every query of its window. Of the others a share may depart, and what chance adds to it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.reach import Reach, Rows
from shared.parity.trace import split_point
from shared.parity.walk import SCORES, Compared

_CODES = ("attn.kv", "attn.compressor")
_COARSE_SHARE = 0.5
_CODE_SHARE = 0.1  # of a row's channels: fewer are codes of it that flipped, each one channel


@dataclass(frozen=True, slots=True)
class Margin:
    """A point departs when more than `row_share` of the rows that nothing reaches do by more than
    `tolerance`, when more than half of all rows do by more than `coarse`, or when more than
    `choice_share` of the rows that have a choice choose what their scores do not say. `finer` has
    (tolerance, row share) of points by the end of their name."""

    tolerance: float
    row_share: float
    choice_share: float
    coarse: float
    finer: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[float, float]:
        own = (margin for end, margin in self.finer.items() if name.endswith(end))
        return next(own, (self.tolerance, self.row_share))


_BF16_FINER = {
    "hc_attn.post": (1e-4, 0.1),
    "hc_attn.comb": (1e-4, 0.1),
    SCORES: (0.05, 0.2),
    ".core": (0.05, 0.4),
    ".merge": (0.05, 0.2),
}
MARGINS = {
    "float32": Margin(1e-4, 0.03, 0.03, 0.05),
    "bfloat16": Margin(0.1, 0.3, 0.03, 0.2, _BF16_FINER),
}
"""By the trainer's dtype, within one block that is given equal streams."""


class RowJudge:
    """Of one sequence, its points in order of computation, each layer on equal streams."""

    def __init__(self, arch: Architecture, margin: Margin) -> None:
        self._arch, self._margin = arch, margin
        self._reach = Reach(arch)
        self._scores: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def tolerance(self, name: str) -> float:
        return self._margin.of(name)[0]

    def weigh(self, found: Compared) -> float:
        """How much departs as a share of what may: beyond 1 the point itself is at fault."""
        layer, part = split_point(found.point.name)
        if not found.by_row.size:
            return 0.0
        if part == "attn.indexer":
            return self._weigh_selection(found, layer)
        if found.point.name.endswith(SCORES):
            return self._weigh_scores(found, layer)
        tolerance, share = self._margin.of(found.point.name)
        moved = found.by_row > tolerance
        judged = ~self._reach.of(layer, part, len(moved))
        self._reach.note(layer, part, moved)
        if found.point.is_choice:  # of experts
            return _weight((moved & judged).sum(), judged.sum(), self._margin.choice_share)
        if part in _CODES:
            moved &= (found.cells > tolerance).mean(-1) > _CODE_SHARE
        judged |= np.isinf(found.by_row)  # no flip explains that
        coarse = float((found.by_row > self._margin.coarse).mean()) / _COARSE_SHARE
        return max(coarse, _weight((moved & judged).sum(), judged.sum(), share))

    def _weigh_scores(self, found: Compared, layer: int | None) -> float:
        """Every entry counts the same: one whose code flipped moves the score of each token that
        sees it. Which entries a token sees depends on no rounding."""
        mine, other = found.mine.astype(np.float64), found.other.astype(np.float64)
        self._scores = (mine, other)
        tolerance, share = self._margin.of(found.point.name)
        unlike = (np.isneginf(mine) != np.isneginf(other)).any(-1)
        if unlike.any():
            return 1 + float(unlike.mean())
        seen = ~np.isneginf(mine)
        reached = self._reach.of(layer, "attn.indexer.scores", len(mine))
        seen[reached] = False
        seen[:, self._reach.entries(mine.shape[1])] = False
        departed = (found.cells > tolerance) & seen
        by_entry = departed.sum(0) / np.maximum(seen.sum(0), 1)
        return _weight(by_entry.sum(), seen.any(0).sum(), share)

    def _weigh_selection(self, found: Compared, layer: int | None) -> float:
        """Rows that choose otherwise than the other side although their own scores do not say so;
        of rows that choose at all, which are those that see more entries than are kept."""
        mine, other = found.mine.astype(bool), found.other.astype(bool)
        self._reach.note(layer, "attn.indexer", found.by_row > 0)
        self._reach.select(mine | other)
        wrong, scores = found.by_row > 0, self._scores
        choosing = np.ones(len(mine), np.bool_)
        if scores is not None and scores[0].shape == mine.shape:
            choosing = (~np.isneginf(scores[0])).sum(-1) > self._arch.index_topk
            sides = zip((mine, other), scores, strict=True)
            follows = [_follows(kept, given) for kept, given in sides]
            wrong &= ~(follows[0] & follows[1]) | (mine.sum(-1) != other.sum(-1))
        return _weight(wrong.sum(), (wrong | choosing).sum(), self._margin.choice_share)


def _follows(kept: NDArray[np.bool_], scores: NDArray[np.float64]) -> Rows:
    """bool [T]: no entry that is left out has a better score than one that is kept."""
    visible = ~np.isneginf(scores)
    worst = np.where(kept & visible, scores, np.inf).min(-1, initial=np.inf)
    best = np.where(~kept & visible, scores, -np.inf).max(-1, initial=-np.inf)
    return np.asarray(worst >= best)


def _weight(departed: float, num: int, share: float) -> float:
    """`departed` of `num` rows, by as many as may: the share, and three deviations of what chance
    makes of it."""
    most = num * share + 3 * math.sqrt(num * share * (1 - share))
    return float(departed / most) if departed else 0.0
