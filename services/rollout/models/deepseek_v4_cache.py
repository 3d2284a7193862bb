"""What a running sequence leaves behind in each layer, in slots; and where a step reads and writes.

A slot belongs to one sequence. Per layer it holds one array of keys (a zero row that the attention
sink stands on, the window ring, then compressed entries) and, where the layer compresses, a ring of
the rows of the open block (with overlap also of the block before) and the indexer's own entries.
All index arithmetic of a step happens here, once, on the host; layers only gather and scatter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.rollout.models.deepseek_v4_weights import ring_columns, ring_rows
from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture

# A matrix product gives a row the same bits whatever the other rows are, from a few rows (and
# columns) up. Every count that follows the batch is rounded up to a multiple of this.
ROWS = 16

_FAR = np.iinfo(np.int64).min // 2


@dataclass(slots=True)
class CompressorCache:
    ring: Tensor  # [slots + 1, ring rows, columns]
    index_keys: Tensor | None  # [slots + 1, entries, I]


@dataclass(slots=True)
class LayerCache:
    """The last slot is the one that padded rows write to."""

    keys: Tensor  # [slots + 1, base + entries, K]
    compressor: CompressorCache | None

    @property
    def tensors(self) -> list[Tensor]:
        inner = self.compressor
        if inner is None:
            return [self.keys]
        return [self.keys, inner.ring, *([] if inner.index_keys is None else [inner.index_keys])]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence, to be appended to its slot from position `start`."""

    slot: int
    start: int
    token_ids: Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Emission:
    """The entries that this step closes, padded to a multiple of ROWS."""

    from_ring: Tensor  # [E · slots of a block] half-rows of the ring
    fresh: tuple[Tensor, Tensor] | None  # likewise among this step's rows, and bool: which are
    has_no_past: Tensor | None  # bool [E]: entry 0, whose a half is empty
    key_rows: Tensor  # [E] rows of the flat keys
    index_rows: Tensor | None  # [E] rows of the flat indexer keys
    turns: Tensor  # complex [E, rope pairs]


@dataclass(frozen=True, slots=True)
class Compression:
    """Where a step's compressor rows go, and which entries they close."""

    entry_bias: Tensor  # [R, C, num_entries]: 0 where visible, -inf elsewhere
    ring_from: Tensor | None  # tokens whose rows are kept; None: all
    ring_to: Tensor  # rows of the flat ring
    phase: Tensor  # [N] row of the position bias
    emission: Emission | None


@dataclass(frozen=True, slots=True)
class Route:
    """One step's indices for the layers of one compression ratio."""

    write_from: Tensor | None  # tokens whose key goes into the window ring; None: all
    write_to: Tensor  # rows of the flat keys
    num_keys: int  # leading keys of a slot that can be visible
    num_entries: int  # compressed entries among them, a multiple of ROWS
    bias: Tensor  # [R, C, num_keys (+ C)]: 0 where visible, -inf elsewhere
    compression: Compression | None


@dataclass(frozen=True, slots=True)
class Step:
    """N tokens (a multiple of ROWS) of R sequences, at most C of each.

    A decoding step has one token per sequence, N = R and C = 1: its keys are written before they
    are read. Otherwise a sequence reads what its slot held before, and the step's own keys.
    """

    token_ids: Tensor  # [N]
    slots: Tensor  # [R]
    width: int  # C
    is_decode: bool
    to_padded: Tensor | None  # [R · C] token of each place
    from_padded: Tensor | None  # [N] place of each token
    plain_turns: tuple[Tensor, Tensor]  # complex [N, 1, rope pairs], forth and back
    compressed_turns: tuple[Tensor, Tensor]
    routes: dict[int, Route]  # by ratio
    num_tokens: int  # real ones; they come first


class Cache:
    def __init__(
        self,
        arch: Architecture,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self._arch = arch
        self._device = device
        self._base = _rounded(1 + arch.sliding_window)  # key row of the first entry
        self._ratios = sorted(set(arch.compress_ratios[: arch.num_hidden_layers]))
        self.layers = [
            self._layer(layer, dtype=dtype, device=device)
            for layer in range(arch.num_hidden_layers)
        ]
        self._turns = [_turns(arch, compressed, max_tokens, dtype, device) for compressed in (0, 1)]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give each target slot the state of its source: samples of a group share their prompt."""
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        for layer in self.layers:
            for tensor in layer.tensors:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def decode_step(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> Step:
        """One token of each sequence: `slots` are distinct, `positions` count from 0."""
        num = len(slots)
        padding = _rounded(num) - num
        slots = np.concatenate((slots, np.full(padding, self.num_slots)))
        positions = np.concatenate((positions, np.zeros(padding, np.int64)))
        token_ids = np.concatenate((token_ids, np.zeros(padding, np.int64)))
        position = self._tensor(positions)
        return Step(
            token_ids=self._tensor(token_ids),
            slots=self._tensor(slots),
            width=1,
            is_decode=True,
            to_padded=None,
            from_padded=None,
            plain_turns=self._turns_at(position, compressed=False),
            compressed_turns=self._turns_at(position, compressed=True),
            routes={
                ratio: self._decode_route(ratio, slots, positions, num) for ratio in self._ratios
            },
            num_tokens=num,
        )

    def prefill_step(self, runs: Sequence[Run]) -> Step:
        """Any number of tokens of several sequences, each at most once."""
        layout = _Layout.of(runs, self.num_slots)
        position = self._tensor(layout.positions)
        return Step(
            token_ids=self._tensor(layout.token_ids),
            slots=self._tensor(layout.run_slots),
            width=layout.width,
            is_decode=False,
            to_padded=self._tensor(layout.to_padded),
            from_padded=self._tensor(layout.from_padded),
            plain_turns=self._turns_at(position, compressed=False),
            compressed_turns=self._turns_at(position, compressed=True),
            routes={ratio: self._prefill_route(ratio, layout) for ratio in self._ratios},
            num_tokens=layout.num_tokens,
        )

    def _layer(self, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        arch, rows = self._arch, self.num_slots + 1
        ratio, kind = arch.compress_ratios[layer], arch.kind(layer)
        entries = self._max_entries(ratio)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=dtype, device=device)

        keys = zeros(self._base + entries, arch.head_dim)
        if not ratio:
            return LayerCache(keys, None)
        ring = zeros(ring_rows(arch, layer), ring_columns(arch, layer))
        index_keys = zeros(entries, arch.index_head_dim) if kind == "c4" else None
        return LayerCache(keys, CompressorCache(ring, index_keys))

    def _decode_route(
        self, ratio: int, slots: np.ndarray, positions: np.ndarray, num: int
    ) -> Route:
        window = self._arch.sliding_window
        row_keys = self._base + self._max_entries(ratio)
        seen = _seen(positions, ratio)
        num_entries = _rounded(int(seen.max())) if ratio else 0
        visible = np.zeros((len(slots), self._base + num_entries), bool)
        visible[:, 0] = True
        visible[:, 1 : 1 + window] = np.arange(window) <= positions[:, None]
        entries = np.arange(num_entries) < seen[:, None]
        visible[:, self._base :] = entries
        return Route(
            write_from=None,
            write_to=self._tensor(slots * row_keys + 1 + positions % window),
            num_keys=self._base + num_entries,
            num_entries=num_entries,
            bias=self._bias(visible)[:, None],
            compression=(
                self._decode_compression(ratio, slots, positions, num, entries) if ratio else None
            ),
        )

    def _decode_compression(
        self, ratio: int, slots: np.ndarray, positions: np.ndarray, num: int, visible: np.ndarray
    ) -> Compression:
        ring = self._ring_size(ratio)
        return Compression(
            entry_bias=self._bias(visible)[:, None],
            ring_from=None,
            ring_to=self._tensor(slots * ring + positions % ring),
            phase=self._tensor(positions % ring),
            emission=self._decode_emission(ratio, slots, positions, num),
        )

    def _decode_emission(
        self, ratio: int, slots: np.ndarray, positions: np.ndarray, num: int
    ) -> Emission | None:
        closing = np.flatnonzero((positions[:num] + 1) % ratio == 0)
        if not len(closing):
            return None
        blocks = positions[closing] // ratio
        return self._emission(ratio, slots[closing], blocks, new=None)

    def _prefill_route(self, ratio: int, layout: "_Layout") -> Route:
        window = self._arch.sliding_window
        row_keys = self._base + self._max_entries(ratio)
        num_entries = _rounded(int(_seen(layout.ends - 1, ratio).max())) if ratio else 0
        kept = layout.tail(window)
        at = layout.padded_positions  # [R, C]
        visible = np.zeros((*at.shape, self._base + num_entries + layout.width), bool)
        visible[..., 0] = True
        # Ring place i holds the latest position before the step that is i modulo the window.
        places, starts = np.arange(window), layout.starts[:, None]
        held = starts - 1 - (starts - 1 - places) % window
        held = np.where(held < 0, _FAR, held)[:, None]
        visible[..., 1 : 1 + window] = held > at[..., None] - window
        entries = np.arange(num_entries) < _seen(at, ratio)[..., None]
        visible[..., self._base : self._base + num_entries] = entries
        gap = np.arange(layout.width)[:, None] - np.arange(layout.width)
        visible[..., self._base + num_entries :] = (gap >= 0) & (gap < window)
        return Route(
            write_from=self._tensor(kept),
            write_to=self._tensor(
                layout.slots[kept] * row_keys + 1 + layout.positions[kept] % window
            ),
            num_keys=self._base + num_entries,
            num_entries=num_entries,
            bias=self._bias(visible),
            compression=self._prefill_compression(ratio, layout, entries) if ratio else None,
        )

    def _prefill_compression(
        self, ratio: int, layout: "_Layout", visible: np.ndarray
    ) -> Compression:
        ring = self._ring_size(ratio)
        recent = layout.tail(ring)
        return Compression(
            entry_bias=self._bias(visible),
            ring_from=self._tensor(recent),
            ring_to=self._tensor(layout.slots[recent] * ring + layout.positions[recent] % ring),
            phase=self._tensor(layout.positions % ring),
            emission=self._prefill_emission(ratio, layout),
        )

    def _prefill_emission(self, ratio: int, layout: "_Layout") -> Emission | None:
        first, last = layout.starts // ratio, layout.ends // ratio  # blocks [first, last) close
        runs = np.repeat(np.arange(len(first)), last - first)
        if not len(runs):
            return None
        earlier = np.cumsum(last - first) - (last - first)
        blocks = (first - earlier)[runs] + np.arange(len(runs))
        return self._emission(ratio, layout.run_slots[runs], blocks, new=(layout, runs))

    def _emission(
        self,
        ratio: int,
        slots: np.ndarray,
        blocks: np.ndarray,
        *,
        new: "tuple[_Layout, np.ndarray] | None",
    ) -> Emission:
        num = len(slots)
        padding = _rounded(num) - num
        overlap = self._selects(ratio)
        ring, halves = self._ring_size(ratio), 2 if overlap else 1
        # With overlap the a halves (even half-rows) of the block before, then the b halves (odd).
        offsets = np.arange(-ratio, ratio) if overlap else np.arange(ratio)
        half = (offsets >= 0).astype(np.int64) if overlap else np.zeros(ratio, np.int64)
        at = blocks[:, None] * ratio + offsets
        from_ring = (slots[:, None] * ring + at % ring) * halves + half
        fresh = None
        if new is not None:
            layout, runs = new
            is_new = (at >= layout.starts[runs, None]) & (at >= 0)
            token = np.where(is_new, layout.firsts[runs, None] + at - layout.starts[runs, None], 0)
            fresh = (
                self._tensor(_pad(token * halves + half, padding, 0).ravel()),
                self._tensor(_pad(is_new, padding, False).ravel()),
            )
        row_keys, row_entries = self._base + self._max_entries(ratio), self._max_entries(ratio)
        trash = self.num_slots
        no_past = overlap and bool((blocks == 0).any())
        return Emission(
            from_ring=self._tensor(_pad(from_ring, padding, 0).ravel()),
            fresh=fresh,
            has_no_past=self._tensor(_pad(blocks == 0, padding, False)) if no_past else None,
            key_rows=self._tensor(
                _pad(slots * row_keys + self._base + blocks, padding, trash * row_keys + self._base)
            ),
            index_rows=(
                self._tensor(_pad(slots * row_entries + blocks, padding, trash * row_entries))
                if overlap
                else None
            ),
            turns=self._turns[1][self._tensor(_pad(blocks * ratio, padding, 0)), 0],
        )

    def _turns_at(self, position: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
        turns = self._turns[compressed].index_select(0, position)
        return turns, turns.conj().resolve_conj()

    def _max_entries(self, ratio: int) -> int:
        return _rounded(self.max_tokens // ratio) if ratio else 0

    def _ring_size(self, ratio: int) -> int:
        return 2 * ratio if self._selects(ratio) else ratio

    def _selects(self, ratio: int) -> bool:
        return ratio == C4_RATIO

    def _bias(self, visible: np.ndarray) -> Tensor:
        dtype = self.layers[0].keys.dtype
        hidden = np.where(visible, 0.0, -np.inf).astype(np.float32)
        return self._tensor(hidden).to(dtype)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Several runs laid end to end, and the places they take when padded to [R, C]."""

    token_ids: np.ndarray  # [N], like the next two: real tokens, then padding
    positions: np.ndarray
    slots: np.ndarray
    run_slots: np.ndarray  # [R], like the next three
    starts: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray  # index of a run's first token
    width: int
    num_tokens: int
    to_padded: np.ndarray
    from_padded: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[Run], trash: int) -> "_Layout":
        lengths = np.array([len(run.token_ids) for run in runs])
        starts = np.array([run.start for run in runs])
        run_slots = np.array([run.slot for run in runs])
        ends_of_tokens = np.cumsum(lengths)
        firsts, num = ends_of_tokens - lengths, int(ends_of_tokens[-1])
        width, padding = _rounded(int(lengths.max()), 8), _rounded(num) - num
        run_of = np.repeat(np.arange(len(runs)), lengths)
        column = np.arange(num) - firsts[run_of]
        to_padded = np.zeros((len(runs), width), np.int64)
        to_padded[run_of, column] = np.arange(num)
        return cls(
            token_ids=np.concatenate([*(run.token_ids for run in runs), np.zeros(padding, int)]),
            positions=_pad(starts[run_of] + column, padding, 0),
            slots=_pad(run_slots[run_of], padding, trash),
            run_slots=run_slots,
            starts=starts,
            ends=starts + lengths,
            firsts=firsts,
            width=width,
            num_tokens=num,
            to_padded=to_padded.ravel(),
            from_padded=_pad(run_of * width + column, padding, 0),
        )

    @property
    def padded_positions(self) -> np.ndarray:
        return self.starts[:, None] + np.arange(self.width)

    def tail(self, size: int) -> np.ndarray:
        """Indices of the last `size` tokens of each run."""
        keep = np.minimum(self.ends - self.starts, size)
        past = np.repeat(np.cumsum(keep) - keep, keep)
        last = np.repeat(self.firsts + (self.ends - self.starts) - keep, keep)
        return last + np.arange(int(keep.sum())) - past


def _seen(positions: np.ndarray, ratio: int) -> np.ndarray:
    """Entries visible to each query: those of blocks closed by then, its own token included."""
    return (positions + 1) // ratio if ratio else np.zeros_like(positions)


def _rounded(count: int, multiple: int = ROWS) -> int:
    return -(-max(count, 1) // multiple) * multiple


def _pad(array: np.ndarray, count: int, value: int | bool) -> np.ndarray:
    if count == 0:
        return array
    return np.concatenate((array, np.full((count, *array.shape[1:]), value, array.dtype)))


def _turns(
    arch: Architecture,
    compressed: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """complex [positions, 1, rope pairs], the bits of the reference and the trainer: the release
    multiplies position by frequency in FP32, which is far from exact at late positions. Made on
    the host, whatever the device."""
    layers = [
        layer
        for layer in range(arch.num_hidden_layers)
        if bool(arch.compress_ratios[layer]) == bool(compressed)
    ]
    if not layers:
        return torch.empty(max_tokens, 1, 0, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = torch.tensor(arch.rope_frequencies(layers[0]), dtype=wide)
    angles = torch.arange(max_tokens).to(wide).unsqueeze(1) * frequencies
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(device)
