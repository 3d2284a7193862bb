"""Which rows a departure upstream reaches, within one layer whose input both sides share.

A flipped code of one key moves every row that sees that key, as it should. A mistake of the
attention core moves rows all of whose inputs agreed. So a point is judged by the rows that nothing
reaches; what reaches them is remembered here, layer by layer.
"""

import numpy as np
from numpy.typing import NDArray

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture

Rows = NDArray[np.bool_]

_READS = {
    "attn.norm": ("hc_attn.mix",),
    "attn.q": ("attn.norm",),
    "attn.kv": ("attn.norm",),
    "attn.indexer.scores": ("attn.norm", "attn.q"),
    "attn": ("attn.core",),
    "hc_attn.merge": ("attn", "hc_attn.post", "hc_attn.comb"),
    "hc_ffn.mix": ("hc_attn.merge",),
    "hc_ffn.post": ("hc_attn.merge",),
    "hc_ffn.comb": ("hc_attn.merge",),
    "ffn.norm": ("hc_ffn.mix",),
    "router": ("ffn.norm",),
    "experts": ("ffn.norm", "router"),
    "shared_experts": ("ffn.norm",),
    "ffn": ("experts", "shared_experts"),
    "hc_ffn.merge": ("ffn", "hc_attn.merge", "hc_ffn.post", "hc_ffn.comb"),
    "norm": ("hc_head.mix",),
    "logits": ("norm",),
}
"""What a point's row reads of the same row; a core and a compressor read other rows as well. A
query and the indexer's come from one latent, which is no point."""


class Reach:
    """Of one sequence, its points noted in order of computation."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._layer: int | None = None
        self._touched: dict[str, Rows] = {}
        self._selected: NDArray[np.bool_] | None = None

    def of(self, layer: int | None, part: str, num_rows: int) -> Rows:
        """bool [num_rows]: rows, or a compressor's entries, that read something that departed."""
        self._enter(layer)
        if part == "attn.compressor":
            return self.entries(num_rows)
        reached = self._rows(_READS.get(part, ()), num_rows)
        return reached | self._by_keys(num_rows) if part == "attn.core" else reached

    def entries(self, num: int) -> Rows:
        """bool [num]: entries of whose tokens one departed before it was compressed."""
        ratio = self._ratio
        rows = self._rows(("attn.norm",), num * ratio)
        tokens = np.asarray(rows.reshape(num, ratio).any(1))
        if ratio == C4_RATIO:  # overlaps the block before
            tokens[1:] |= tokens[:-1].copy()
        return tokens

    def note(self, layer: int | None, part: str, departed: Rows) -> None:
        """Rows of a point that depart at all; what reached them reaches what reads them."""
        self._touched[part] = departed | self.of(layer, part, len(departed))

    def select(self, selected: NDArray[np.bool_]) -> None:
        """bool [T, E]: the entries that either side's indexer keeps."""
        self._selected = selected

    @property
    def _ratio(self) -> int:
        return 0 if self._layer is None else self._arch.compress_ratios[self._layer]

    def _enter(self, layer: int | None) -> None:
        if layer != self._layer:
            self._layer, self._touched, self._selected = layer, {}, None

    def _rows(self, parts: tuple[str, ...], num: int) -> Rows:
        rows = np.zeros(num, np.bool_)
        for part in parts:
            found = self._touched.get(part, rows[:0])[:num]
            rows[: len(found)] |= found
        return rows

    def _by_keys(self, num: int) -> Rows:
        """Rows whose query, selection, or one of whose keys or entries departed."""
        reached = self._rows(("attn.q", "attn.indexer"), num)
        keys = np.flatnonzero(self._rows(("attn.kv",), num))
        for key in keys:
            reached[key : key + self._arch.sliding_window] = True
        entries = self._touched.get("attn.compressor", reached[:0])
        if len(entries):
            seen = self._seen(num, len(entries))
            reached |= (seen & entries[: seen.shape[1]]).any(1)
        return reached

    def _seen(self, num: int, entries: int) -> NDArray[np.bool_]:
        if self._selected is not None:
            return self._selected[:, :entries]
        closed = (np.arange(num) + 1) // self._ratio
        return np.asarray(np.arange(entries) < closed[:, None])
