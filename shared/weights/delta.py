"""What changed in a tensor since a base that the receiver holds: positions and values, no more.

One optimiser step moves few of a quantised matrix's codes, but some in every part; so elements are
sent, not blocks. A delta works on raw bytes and rebuilds them exactly, whatever they mean. Whether
the base was the right one is not its business: the checksum of the result tells.

    header | for every run of elements: header | positions | steps | whole values

Each run of a tensor takes what is smallest for it: positions as gaps of one or two bytes, or a
bitmap where much has changed; values whole, or as steps of 4, 8 or 16 bits where most move to a
near neighbour in their format (codes of E4M3, numbers of BF16 and FP32).
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shared.errors import WeightsCorrupt

Positions = Literal["gaps8", "gaps16", "bitmap"]
Values = Literal["whole", "steps4", "steps8", "steps16"]
Buffer = bytes | bytearray | memoryview | NDArray[Any]
Array = NDArray[Any]

DEFAULT_MAX_SHARE = 0.8

_FORMAT = 1
_HEADER = struct.Struct("<BBxxxxxxQQ")  # format, bytes of an element, elements, changed ones
_RUN = struct.Struct("<BBxxIII")  # two forms, changed elements, bytes of positions, whole values
_RUN_ITEMS = 1 << 20  # so that what is made of a run stays in a cache
_POSITIONS: tuple[Positions, ...] = ("gaps8", "gaps16", "bitmap")
_VALUES: tuple[Values, ...] = ("whole", "steps4", "steps8", "steps16")
_GAPS: dict[Positions, np.dtype[Any]] = {"gaps8": np.dtype("<u1"), "gaps16": np.dtype("<u2")}
_ELEMENTS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_STEP_BITS: dict[Values, int] = {"steps4": 4, "steps8": 8, "steps16": 16}


@dataclass(frozen=True, slots=True)
class Changes:
    """Of one run: where its elements differ (ascending, from the run's start) and what is there."""

    num_items: int
    at: Array
    old: Array
    new: Array


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    item_bytes: int
    num_items: int
    num_changed: int


def encode_delta(
    base: Buffer, new: Buffer, *, item_bytes: int, max_share: float = DEFAULT_MAX_SHARE
) -> bytes | None:
    """The bytes that turn `base` into `new`; None if they were more than `max_share` of `new`.

    Both are raw bytes of one size, `item_bytes` (1, 2, 4 or 8) to an element.
    """
    old_N, new_N = _elements(base, item_bytes), _elements(new, item_bytes)
    if len(old_N) != len(new_N):
        raise ValueError(f"expected {len(old_N)} elements as in the base, found {len(new_N)}")
    changes = (_changes(old_N[run], new_N[run]) for run in runs(len(new_N)))
    return encode_changes(changes, item_bytes=item_bytes, num_items=len(new_N), max_share=max_share)


def encode_changes(
    changes: Iterable[Changes], *, item_bytes: int, num_items: int, max_share: float
) -> bytes | None:
    """`encode_delta` for whoever knows what has changed, in each of `runs(num_items)`."""
    limit = max_share * num_items * item_bytes
    parts, size, num_changed = [b""], _HEADER.size, 0
    for run in changes:
        run_parts = _encode_run(run)
        parts += run_parts
        num_changed += len(run.at)
        size += sum(map(len, run_parts))
        if size > limit:
            return None
    parts[0] = _HEADER.pack(_FORMAT, item_bytes, num_items, num_changed)
    return b"".join(parts) if size <= limit else None


def apply_delta(base: Buffer, delta: Buffer, *, out: Array | None = None) -> NDArray[np.uint8]:
    """The bytes that `encode_delta` was given as new.

    `out` (uint8, as long as `base`) takes them and may be the base itself, which is then half
    changed if the delta turns out to be damaged: WeightsCorrupt.
    """
    header = read_header(delta)
    num_bytes = len(np.frombuffer(base, np.uint8))
    if num_bytes != header.num_items * header.item_bytes:
        elements = f"{header.num_items} elements of {header.item_bytes} bytes"
        raise WeightsCorrupt(f"a delta of {elements}, a base of {num_bytes} bytes")
    old_N = _elements(base, header.item_bytes)
    result = np.empty(old_N.nbytes, np.uint8) if out is None else out
    result_N = result.view(old_N.dtype)
    same = result_N.ctypes.data == old_N.ctypes.data
    reader = _Reader(np.frombuffer(delta, np.uint8)[_HEADER.size :])
    num_changed = 0
    for run in runs(len(old_N)):
        if not same:
            np.copyto(result_N[run], old_N[run])
        num_changed += _apply_run(result_N[run], reader)
    if num_changed != header.num_changed or len(reader.rest):
        raise WeightsCorrupt(
            f"a delta of {header.num_changed} changes has {num_changed} of them, "
            f"and {len(reader.rest)} bytes too much"
        )
    return result


def read_header(delta: Buffer) -> DeltaHeader:
    """WeightsCorrupt if these bytes are no delta."""
    raw = np.frombuffer(delta, np.uint8)
    if len(raw) < _HEADER.size or raw[0] != _FORMAT or raw[1] not in _ELEMENTS:
        raise WeightsCorrupt(f"{len(raw)} bytes that are no delta")
    _, *fields = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    return DeltaHeader(*fields)


def _elements(raw: Buffer, item_bytes: int) -> Array:
    if item_bytes not in _ELEMENTS:
        raise ValueError(f"item_bytes: expected one of {list(_ELEMENTS)}, found {item_bytes}")
    flat = np.frombuffer(raw, np.uint8)
    if len(flat) % item_bytes:
        raise ValueError(f"{len(flat)} bytes are no multiple of {item_bytes}")
    return flat.view(_ELEMENTS[item_bytes])


def runs(num_items: int) -> Iterator[slice]:
    """The runs that a tensor of `num_items` elements is cut into."""
    for begin in range(0, num_items, _RUN_ITEMS):
        yield slice(begin, min(begin + _RUN_ITEMS, num_items))


def _changes(old: Array, new: Array) -> Changes:
    at = np.flatnonzero(old != new)
    return Changes(len(new), at, old[at], new[at])


def _encode_run(run: Changes) -> list[bytes]:
    """Header and bodies."""
    positions, position_bytes = _encode_positions(run.at, run.num_items)
    values, step_bytes, whole = _encode_values(run.old, run.new)
    forms = _POSITIONS.index(positions), _VALUES.index(values)
    header = _RUN.pack(*forms, len(run.at), len(position_bytes), len(whole))
    return [header, position_bytes, step_bytes, whole.tobytes()]


def _encode_positions(at: Array, num_items: int) -> tuple[Positions, bytes]:
    gaps = np.empty(len(at), np.int32)
    if len(at):
        gaps[0] = at[0]
        np.subtract(at[1:], at[:-1] + 1, out=gaps[1:], casting="unsafe")
    costs: dict[Positions, int] = {"bitmap": (num_items + 7) // 8}
    for name, dtype in _GAPS.items():
        full = np.iinfo(dtype).max
        skips = int((gaps[gaps >= full] // full).sum())
        costs[name] = dtype.itemsize * (len(gaps) + skips)
    best = min(_POSITIONS, key=lambda name: costs[name])
    if best == "bitmap":
        differs = np.zeros(num_items, np.bool_)
        differs[at] = True
        return best, np.packbits(differs).tobytes()
    return best, _encode_gaps(gaps, _GAPS[best]).tobytes()


def _encode_gaps(gaps: NDArray[np.int32], dtype: np.dtype[Any]) -> Array:
    """A full number skips as many elements as it says; another one skips and then marks one."""
    full = np.iinfo(dtype).max
    wide = np.flatnonzero(gaps >= full)
    if not len(wide):
        return gaps.astype(dtype)
    skips, rest = np.divmod(gaps[wide], full)
    gaps[wide] = rest
    return np.insert(gaps.astype(dtype), np.repeat(wide, skips), full)


def _encode_values(old: Array, new: Array) -> tuple[Values, bytes, Array]:
    """(form, steps, values that are sent whole).

    A step of b bits is the difference plus 2^(b-1); 0 stands for a value that is sent whole.
    """
    moves = (new - old).view(f"<i{new.itemsize}")
    best: tuple[int, Values, Array] = (new.nbytes, "whole", moves)
    for form, bits in _STEP_BITS.items():
        if bits >= 8 * new.itemsize:
            break
        most = (1 << (bits - 1)) - 1
        far = (moves < -most) | (moves > most)
        cost = (len(new) * bits + 7) // 8 + int(np.count_nonzero(far)) * new.itemsize
        if cost < best[0]:
            best = (cost, form, far)
    _, form, far = best
    if form == "whole":
        return form, b"", new
    bits = _STEP_BITS[form]
    codes = (moves + (1 << (bits - 1))).astype(np.uint16 if bits == 16 else np.uint8)
    codes[far] = 0
    return form, _pack_codes(codes, bits), new[far]


def _pack_codes(codes: Array, bits: int) -> bytes:
    """Two of 4 bits in a byte, the first low; wider ones as they are."""
    if bits == 4:
        pairs = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
        codes = pairs[0::2] | pairs[1::2] << 4
    return codes.astype(codes.dtype.newbyteorder("<"), copy=False).tobytes()


class _Reader:
    """Takes bytes from the front; WeightsCorrupt when they are too few."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self.rest = raw

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > len(self.rest):
            raise WeightsCorrupt(f"a delta ends {num_bytes - len(self.rest)} bytes too early")
        taken, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return taken

    def fields(self) -> tuple[int, ...]:
        """The header of a run."""
        return _RUN.unpack(self.take(_RUN.size).tobytes())


def _apply_run(result: Array, reader: _Reader) -> int:
    """Change `result`, which holds the base; how many elements."""
    positions, values, num_changed, position_bytes, num_whole = reader.fields()
    if positions >= len(_POSITIONS) or values >= len(_VALUES):
        raise WeightsCorrupt(f"a delta of unknown form ({positions}, {values})")
    at = _decode_positions(reader.take(position_bytes), _POSITIONS[positions], len(result))
    if len(at) != num_changed or (num_changed and at[-1] >= len(result)):
        raise WeightsCorrupt(f"positions are not of {num_changed} in {len(result)} elements")
    bits = _STEP_BITS.get(_VALUES[values], 0)
    if bits >= 8 * result.itemsize:
        raise WeightsCorrupt(f"steps of {bits} bits in elements of {8 * result.itemsize}")
    steps = reader.take((num_changed * bits + 7) // 8)
    whole = reader.take(num_whole * result.itemsize).view(result.dtype)
    if bits:
        whole = _decode_steps(_unpack_codes(steps, bits)[:num_changed], bits, whole, result[at])
    if len(whole) != num_changed:
        raise WeightsCorrupt(f"{len(whole)} values for {num_changed} positions")
    result[at] = whole
    return num_changed


def _decode_positions(raw: NDArray[np.uint8], form: Positions, num_items: int) -> NDArray[np.int64]:
    if form == "bitmap":
        if len(raw) != (num_items + 7) // 8:
            raise WeightsCorrupt(f"a bitmap of {len(raw)} bytes for {num_items} elements")
        return np.flatnonzero(np.unpackbits(raw, count=num_items).view(np.bool_))
    dtype = _GAPS[form]
    if len(raw) % dtype.itemsize:
        raise WeightsCorrupt(f"{len(raw)} bytes of gaps of {dtype.itemsize}")
    stream = np.frombuffer(raw.tobytes(), dtype)
    marks = stream != np.iinfo(dtype).max
    ends = np.cumsum(stream + marks.astype(np.int64))
    at: NDArray[np.int64] = ends[marks] - 1
    return at


def _unpack_codes(raw: NDArray[np.uint8], bits: int) -> Array:
    if bits != 4:
        return raw.view(f"<u{bits // 8}")
    codes = np.empty(2 * len(raw), np.uint8)
    codes[0::2], codes[1::2] = raw & 0xF, raw >> 4
    return codes


def _decode_steps(codes: Array, bits: int, whole: Array, old: Array) -> Array:
    far = codes == 0
    if np.count_nonzero(far) != len(whole):
        raise WeightsCorrupt(f"{np.count_nonzero(far)} values are whole, found {len(whole)}")
    values: Array = old + codes.astype(old.dtype) - old.dtype.type(1 << (bits - 1))
    values[far] = whole
    return values
