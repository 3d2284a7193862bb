"""Where two implementations part: inner states of the same tokens, in order of computation.

Each side gives `{point: array}` with names of `names.trace_points`; the first point that departs
names the sub-module, because everything it reads still agreed. A side may leave points out: then
those before the departure that nobody compared are suspects, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
_SCORES = ".indexer.scores"
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
    share of rows above the tolerance. It is not `is_whole` where only expert ids could be compared,
    not their weights.
    """

    name: str
    label: str
    departure: float
    row: int
    share: float = 0.0
    is_choice: bool = False
    is_whole: bool = True


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


def walk(
    ours: States,
    theirs: States,
    arch: Architecture,
    *,
    tolerance: float = TOLERANCE,
    row_share: float = 0.0,
    choice_share: float = 0.0,
    finer: Mapping[str, tuple[float, float]] | None = None,
    names: Sequence[str] | None = None,
) -> Walk:
    """Compare every point that both sides have; ValueError when their sizes differ.

    A point departs when more than `row_share` of its rows do (`choice_share` where the state is a
    choice). Between sides that round activations a sum in another order flips a code now and then:
    a few rows are then no mistake. `finer` has (tolerance, row share) of points by the end of their
    name, where they are known to agree more closely. `names` are the points to walk, in order of
    computation; all of them unless told otherwise.
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
        own = next((m for end, m in (finer or {}).items() if name.endswith(end)), None)
        most, rows = own or (tolerance, row_share)
        point = _compare(name, ours[name], theirs[name], arch, most)
        points.append(point)
        allowed = choice_share if point.is_choice else rows
        if first is None and point.departure > most and point.share > allowed:
            first, suspects = point, [*suspects, name]
        elif first is None:
            suspects = [s for s in suspects if not _clears(name, s)]
            suspects += [] if point.is_whole else [name]
    if not points:
        raise ValueError(f"no common point: {len(ours)} names here, {len(theirs)} there")
    labels = dict.fromkeys(map(label, suspects)) if first is not None else {}
    return Walk(tuple(points), tuple(missing), tolerance, first, tuple(labels), row_share)


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


def _compare(name: str, ours: Any, theirs: Any, arch: Architecture, tolerance: float) -> Point:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.size == theirs.size == 0:  # too few tokens for an entry
        return Point(name, label(name), 0.0, 0)
    mine, other = _common_form(name, ours, theirs, arch)
    if name.endswith(_SCORES) and mine.shape == other.shape:
        return _compare_scores(name, mine, other, tolerance)
    if mine.shape != other.shape:
        raise ValueError(f"{name}: {mine.shape} here, {other.shape} there: not the same tokens")
    if mine.dtype == np.bool_:
        differs = (mine != other).any(-1)
        departure, row = float(differs.mean()), int(differs.argmax())
        is_whole = not name.endswith(".router")
        return Point(name, label(name), departure, row, departure, True, is_whole)
    by_row = _departures(mine.astype(np.float64), other.astype(np.float64))
    row = int(by_row.argmax())
    share = float((by_row > tolerance).mean())
    return Point(name, label(name), float(by_row[row]), row, share)


def _compare_scores(name: str, mine: NDArray[Any], other: NDArray[Any], tolerance: float) -> Point:
    """What an indexer gives the entries that each token sees, -inf for the others.

    `share` is of single scores: an entry in which one code flipped moves the score of every later
    token, and is still one entry. Which entries a token sees depends on no rounding: it is the
    share of tokens that see others, if that is larger.
    """
    unlike = (np.isneginf(mine) != np.isneginf(other)).any(-1)
    seen = ~(np.isneginf(mine) | np.isneginf(other))
    ours, theirs = (np.where(seen, x, 0.0).astype(np.float64) for x in (mine, other))
    flat = _departures(ours.reshape(-1, 1), theirs.reshape(-1, 1)).reshape(ours.shape)
    by_row = np.maximum(flat.max(-1), unlike)
    row = int(by_row.argmax())
    share = max(float((flat > tolerance).sum() / max(seen.sum(), 1)), float(unlike.mean()))
    return Point(name, label(name), float(by_row[row]), row, share)


def _departures(mine: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row, as a share of the largest value; a NaN or an infinity departs without bound."""
    difference = np.abs(mine - other).max(-1)
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
