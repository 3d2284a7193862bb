"""Where two implementations part: inner states of the same tokens, in order of computation.

Each side gives `{point: array}` with names of `names.trace_points`; the first point that departs
names the sub-module, because everything it reads still agreed. A side may leave points out: then
those before the departure that nobody compared are suspects, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import trace_points

States = Mapping[str, Any]
"""Point -> anything `numpy.asarray` takes: a NumPy array, a CPU tensor in FP32 or float64."""

TOLERANCE = 1e-4
"""Between two FP32 implementations: ten times what sums in another order leave behind."""

_SUBMODULES = {
    "hc_attn.mix": "mHC mix before attention",
    "hc_attn.post": "mHC mix before attention",
    "hc_attn.comb": "mHC Sinkhorn before attention",
    "attn.norm": "attention norm",
    "attn.q": "query projection and RoPE",
    "attn.kv": "key projection and RoPE",
    "attn.compressor": "compressor",
    "attn.indexer.scores": "indexer",
    "attn.indexer": "indexer",
    "attn.core": "attention core",
    "attn": "attention output projection",
    "hc_attn.merge": "mHC merge after attention",
    "hc_ffn.mix": "mHC mix before experts",
    "hc_ffn.post": "mHC mix before experts",
    "hc_ffn.comb": "mHC Sinkhorn before experts",
    "ffn.norm": "expert norm",
    "router": "router",
    "experts": "routed experts",
    "shared_experts": "shared expert",
    "ffn": "sum of experts",
    "hc_ffn.merge": "mHC merge after experts",
}
_READ_BY = {
    "hc_attn.post": "hc_attn.merge",
    "hc_attn.comb": "hc_attn.merge",
    "attn.q": "attn.core",
    "attn.kv": "attn.core",
    "attn.compressor": "attn.core",
    "attn.indexer.scores": "attn.indexer",
    "attn.indexer": "attn.core",
    "hc_ffn.post": "hc_ffn.merge",
    "hc_ffn.comb": "hc_ffn.merge",
    "router": "ffn",
    "experts": "ffn",
    "shared_experts": "ffn",
}
"""States that the next point does not read; the others are read by the one after them."""
SCORES = ".indexer.scores"
_TWO_DIMS = (".comb", ".merge", ".attn.q", ".attn.core")
_OUTER = {
    "embed": "embedding",
    "hc_head.mix": "mHC mix before the head",
    "norm": "final norm",
    "logits": "output head",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One compared state. `departure` is the largest difference as a share of the largest value;
    where the state is a choice (`attn.indexer`, `router` ids) the share of rows that chose
    differently. `row` is where it is largest: a token, or an entry for a compressor; `share` is the
    share of rows above the tolerance; `weight` how much of what may depart does, beyond 1 too much.
    It is not `is_whole` where only expert ids could be compared, not their weights.
    """

    name: str
    label: str
    departure: float
    row: int
    share: float = 0.0
    is_choice: bool = False
    is_whole: bool = True
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Walk:
    """All compared points in order, and the first that departs.

    `suspects` are the labels that may be at fault: the first departure, and before it what a side
    left out and no agreeing point has read since.
    """

    points: tuple[Point, ...]
    missing: tuple[str, ...]
    tolerance: float
    first: Point | None
    suspects: tuple[str, ...]
    row_share: float = 0.0

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        if self.first is None:
            return f"no departure above {self.tolerance:g} at {len(self.points)} points"
        text = f"{self.first.label} departs by {self.first.departure:.2g} at row {self.first.row}"
        others = [suspect for suspect in self.suspects if suspect != self.first.label]
        return f"{text}; not compared before it: {', '.join(others)}" if others else text


@dataclass(frozen=True, slots=True)
class Compared:
    """One point of both sides, `[rows, width]` each, and by how much its cells and rows depart: as
    a share of the largest value, without bound where a value is not finite."""

    point: Point
    mine: NDArray[Any]
    other: NDArray[Any]
    by_row: NDArray[np.float64]  # of a choice 1 where the row chose otherwise
    cells: NDArray[np.float64]


class Judge(Protocol):
    """How much of a point departs by itself, beyond 1 too much; asked in order of computation."""

    def tolerance(self, name: str) -> float: ...

    def weigh(self, found: Compared) -> float: ...


def walk(
    ours: States,
    theirs: States,
    arch: Architecture,
    *,
    tolerance: float = TOLERANCE,
    judge: Judge | None = None,
    names: Sequence[str] | None = None,
) -> Walk:
    """Compare every point that both sides have; ValueError when their sizes differ.

    A point departs when one of its rows does, or when the `judge` says so, whose tolerances are
    then used. `names` are the points to walk, in order of computation; all of them unless told
    otherwise.
    """
    points: list[Point] = []
    missing: list[str] = []
    suspects: list[str] = []
    first: Point | None = None
    for name in trace_points(arch) if names is None else names:
        if name not in ours or name not in theirs:
            missing.append(name)
            suspects += [name] if first is None else []
            continue
        most = tolerance if judge is None else judge.tolerance(name)
        found = _compare(name, ours[name], theirs[name], arch, most)
        weight = found.point.departure / most if judge is None else judge.weigh(found)
        points.append(point := replace(found.point, weight=weight))
        if first is None and weight > 1:
            first, suspects = point, [*suspects, name]
        elif first is None:
            suspects = [s for s in suspects if not _clears(name, s)]
            suspects += [] if point.is_whole else [name]
    if not points:
        raise ValueError(f"no common point: {len(ours)} names here, {len(theirs)} there")
    labels = dict.fromkeys(map(label, suspects)) if first is not None else {}
    return Walk(tuple(points), tuple(missing), tolerance, first, tuple(labels))


def label(point: str) -> str:
    """`layers.2.hc_ffn.merge` -> `layer 2 · mHC merge after experts`."""
    if point in _OUTER:
        return _OUTER[point]
    _, layer, part = point.split(".", 2)
    return f"layer {layer} · {_SUBMODULES[part]}"


def routing_agreement(ours: States, theirs: States, arch: Architecture) -> dict[int, float]:
    """Layer -> share of tokens that both sides send to the same experts."""
    shares: dict[int, float] = {}
    for layer in range(arch.num_hidden_layers):
        name = f"layers.{layer}.router"
        if name in ours and name in theirs:
            same = _chosen(ours[name], arch) == _chosen(theirs[name], arch)
            shares[layer] = float(same.all(-1).mean())
    return shares


def _clears(point: str, suspect: str) -> bool:
    """Whether a point that agrees vouches for an earlier one: it must have read it."""
    if point in _OUTER or suspect in _OUTER:
        return True
    _, layer, part = point.split(".", 2)
    _, suspect_layer, suspect_part = suspect.split(".", 2)
    if layer != suspect_layer:
        return True
    order = list(_SUBMODULES)
    reader = _READ_BY.get(suspect_part, suspect_part)
    return order.index(part) >= order.index(reader)


def _compare(name: str, ours: Any, theirs: Any, arch: Architecture, tolerance: float) -> Compared:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.size == theirs.size == 0:  # too few tokens for an entry
        none = np.zeros((0, 1))
        return Compared(Point(name, label(name), 0.0, 0), none, none, none[:, 0], none)
    mine, other = _common_form(name, ours, theirs, arch)
    if mine.shape != other.shape:
        raise ValueError(f"{name}: {mine.shape} here, {other.shape} there: not the same tokens")
    if mine.dtype == np.bool_:
        return _choices(name, mine, other)
    unlike: NDArray[Any] = np.zeros(len(mine), np.bool_)
    wide, wide_other = mine.astype(np.float64), other.astype(np.float64)
    if name.endswith(SCORES):  # -inf where a token does not see the entry
        unlike = (np.isneginf(mine) != np.isneginf(other)).any(-1)
        seen = ~(np.isneginf(mine) | np.isneginf(other))
        wide, wide_other = (np.where(seen, x, 0.0) for x in (wide, wide_other))
    cells = _departures(wide, wide_other)
    by_row = np.maximum(cells.max(-1), unlike)
    row, share = int(by_row.argmax()), float((by_row > tolerance).mean())
    return Compared(
        Point(name, label(name), float(by_row[row]), row, share), mine, other, by_row, cells
    )


def _choices(name: str, mine: NDArray[Any], other: NDArray[Any]) -> Compared:
    cells = (mine != other).astype(np.float64)
    by_row = cells.max(-1)
    share, row = float(by_row.mean()), int(by_row.argmax())
    is_whole = not name.endswith(".router")
    point = Point(name, label(name), share, row, share, True, is_whole)
    return Compared(point, mine, other, by_row, cells)


def _departures(mine: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """As a share of the largest value; a NaN or an infinity departs without bound."""
    with np.errstate(invalid="ignore"):  # of infinities
        difference = np.abs(mine - other)
    scale = np.abs(other).max()
    if scale == 0:
        difference = (difference > 0).astype(np.float64)
    elif np.isfinite(scale):
        difference = difference / scale
    difference[~np.isfinite(difference)] = np.inf
    return np.asarray(difference)


def _common_form(
    name: str, mine: NDArray[Any], other: NDArray[Any], arch: Architecture
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as [rows, width], in whichever form both have."""
    if name == "embed":  # once per token, or once per stream
        width = arch.hidden_size
        mine, other = mine.reshape(-1, width), other.reshape(-1, width)
        if len(mine) != len(other):
            mine, other = (_first_of(x, max(len(mine), len(other)), arch) for x in (mine, other))
        return mine, other
    if name.endswith(".router") and (mine.dtype.kind in "iu" or other.dtype.kind in "iu"):
        return _chosen(mine, arch), _chosen(other, arch)
    return _rows(mine, name), _rows(other, name)


def _first_of(rows: NDArray[Any], longest: int, arch: Architecture) -> NDArray[Any]:
    return rows[:: arch.hc_mult] if len(rows) == longest else rows


def _rows(x: NDArray[Any], name: str) -> NDArray[Any]:
    """One row per token; streams and heads are part of a row."""
    dims = 2 if name.endswith(_TWO_DIMS) else 1
    return x.reshape(-1, math.prod(x.shape[-dims:]))


def _chosen(router: Any, arch: Architecture) -> NDArray[np.bool_]:
    """[T, E] membership, from ids [T, k] or from dense weights [..., E]."""
    given = _rows(np.asarray(router), "router")
    if given.dtype.kind not in "iu":
        return np.asarray(given > 0)
    chosen = np.zeros((len(given), arch.n_routed_experts), np.bool_)
    np.put_along_axis(chosen, given.astype(np.int64), True, axis=1)
    return chosen
