"""Where two tensors differ, and what stands there: the part of a delta that reads every byte.

Two passes. The first compares 32-bit words, a chunk of them to a program, and gathers those that
differ in the chunk's own slots, each with the rank of its first element; the second takes the words
apart into elements, in order. So both tensors are read once, and nothing is written but what has
changed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.quant.kernels.launch import device_of

ROWS = 8  # of 128 words, a tile: each row is one warp's
TILES = 8  # of a chunk; they are loaded ahead
CHUNK_WORDS = 128 * ROWS * TILES
SLOTS = CHUNK_WORDS // 4  # words of a chunk that may differ

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_LEAST_ROOM = 1 << 16


@dataclass(frozen=True, slots=True)
class Changes:
    """All changed elements in order, on the tensors' device."""

    at: Tensor  # int32, or int64 where they do not fit
    old: Tensor  # raw elements: uint8, int16 or int32
    new: Tensor


def supports(tensor: Tensor) -> bool:
    """Whether the kernels can read it: elements of 1, 2 or 4 bytes that fill whole words."""
    width = tensor.element_size()
    whole = tensor.numel() * width % 4 == 0 and tensor.data_ptr() % 4 == 0
    return width in _ELEMENTS and whole and tensor.is_contiguous()


def find_changes(base: Tensor, new: Tensor) -> Changes | None:
    """Elements that differ in their bytes; None if they are more than an eighth of all (and than
    65,536), or more words of a chunk than it has slots.

    Both tensors are what `supports` accepts, with one shape and dtype. While it runs it takes up to
    twice the bytes of one of them.
    """
    device, width = base.device, base.element_size()
    words = base.numel() * width // 4
    chunks = triton.cdiv(words, CHUNK_WORDS)
    if not chunks:
        return _room(0, base)
    slots = torch.empty(3, chunks * SLOTS, dtype=torch.int32, device=device)
    counts = torch.empty(2, chunks, dtype=torch.int32, device=device)
    with device_of(base):
        _gather[(chunks,)](
            _words(base),
            _words(new),
            *slots,
            *counts,
            words,
            WIDTH=width,
            ROWS=ROWS,
            TILES=TILES,
            SLOTS=SLOTS,
            num_warps=4,
        )
        # All this is asked of the device while it gathers; it answers when all is done.
        most, ends = counts[0].amax(), counts[1].cumsum(0, dtype=torch.int64)
        told = torch.stack((most.long(), ends[-1]))
        room = min(base.numel(), max(base.numel() // 8, _LEAST_ROOM))
        found = _room(room, base)
        _spread[(chunks,)](
            *slots,
            *counts,
            ends,
            found.at,
            found.old,
            found.new,
            room,
            WIDTH=width,
            CHUNK=CHUNK_WORDS,
            SLOTS=SLOTS,
            BLOCK=128,
            num_warps=4,
        )
    most_words, total = told.tolist()
    if most_words > SLOTS or total > room:
        return None
    return Changes(found.at[:total], found.old[:total], found.new[:total])


def _words(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8).view(torch.int32)


def _room(total: int, like: Tensor) -> Changes:
    """For so many changes."""
    values = torch.empty(2, total, dtype=_ELEMENTS[like.element_size()], device=like.device)
    positions = torch.int32 if like.numel() < 2**31 else torch.int64
    return Changes(torch.empty(total, dtype=positions, device=like.device), *values)


@triton.jit
def _gather(
    base,
    new,
    marks,
    olds,
    news,
    num_words,
    num_elements,
    words,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    TILE: tl.constexpr = ROWS * 128
    chunk = tl.program_id(0).to(tl.int64)
    start, first = chunk * TILE * TILES, chunk * SLOTS
    place = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    found_words, found = 0, 0
    for tile in tl.range(0, TILES, num_stages=3):
        here = tile * TILE + place
        inside = here < words - start
        was = tl.load(base + start + here, mask=inside, other=0)
        now = tl.load(new + start + here, mask=inside, other=0)
        # Words and elements are counted at once, in the halves of one number. A row is ranked
        # within its warp; only the sums of rows are added up across warps.
        elements = _differing(was ^ now, WIDTH)
        both = (was != now).to(tl.int32) | (elements << 16)
        sums = tl.sum(both, 1)
        rank = (tl.cumsum(sums, 0) - sums)[:, None] + tl.cumsum(both, 1)
        mark = here | ((rank >> 16) - elements + found) << 16
        # These hints are not true, and harmless, since the mask keeps stores apart: they only make
        # the compiler store from where it loaded to; else all goes through shared memory first.
        slot = (rank & 0xFFFF) - 1 + found_words
        slot = tl.max_contiguous(tl.multiple_of(slot, (1, 4)), (1, 4))
        kept = (was != now) & (slot < SLOTS)
        tl.store(marks + first + slot, mark, mask=kept)
        tl.store(olds + first + slot, was, mask=kept)
        tl.store(news + first + slot, now, mask=kept)
        totals = tl.sum(sums, 0)
        found_words += totals & 0xFFFF
        found += totals >> 16
    tl.store(num_words + chunk, found_words)
    tl.store(num_elements + chunk, found)


@triton.jit
def _differing(bits, WIDTH: tl.constexpr):
    """How many elements of a word have any bit set."""
    bits = bits.to(tl.uint32, bitcast=True)
    if WIDTH == 4:
        return (bits != 0).to(tl.int32)
    elif WIDTH == 2:
        marks = (((bits & 0x7FFF7FFF) + 0x7FFF7FFF) | bits) >> 15 & 0x00010001
        return ((marks + (marks >> 16)) & 3).to(tl.int32)
    else:
        marks = (((bits & 0x7F7F7F7F) + 0x7F7F7F7F) | bits) >> 7 & 0x01010101
        pairs = marks + (marks >> 8)
        return ((pairs + (pairs >> 16)) & 7).to(tl.int32)


@triton.jit
def _spread(
    marks,
    olds,
    news,
    num_words,
    num_elements,
    ends,
    at,
    old,
    new,
    room,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PER_WORD: tl.constexpr = 4 // WIDTH
    chunk = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_words + chunk), SLOTS)
    begin = tl.load(ends + chunk) - tl.load(num_elements + chunk)
    start = 0
    while start < count:
        number = start + tl.arange(0, BLOCK)
        inside = number < count
        mark = tl.load(marks + chunk * SLOTS + number, mask=inside, other=0)
        was = tl.load(olds + chunk * SLOTS + number, mask=inside, other=0)
        now = tl.load(news + chunk * SLOTS + number, mask=inside, other=0)
        position = (chunk * CHUNK + (mark & 0xFFFF)) * PER_WORD
        rank = begin + (mark >> 16 & 0xFFFF)
        # Of most words one element differs: the first of each, then of those that have another.
        rest, goes_on = was ^ now, 1
        while goes_on > 0:
            part = _first(rest, WIDTH)
            kept = (rest != 0) & (rank < room)
            one, two = _element(was, part, WIDTH), _element(now, part, WIDTH)
            tl.store(at + rank, (position + part).to(at.dtype.element_ty), mask=kept)
            tl.store(old + rank, one.to(old.dtype.element_ty), mask=kept)
            tl.store(new + rank, two.to(new.dtype.element_ty), mask=kept)
            rank += 1
            rest = _without(rest, part, WIDTH)
            goes_on = tl.max((rest != 0).to(tl.int32), 0)
        start += BLOCK


@triton.jit
def _first(bits, WIDTH: tl.constexpr):
    """Which element of a word has the lowest bit that is set."""
    lowest = (bits & -bits).to(tl.uint32, bitcast=True)
    if WIDTH == 4:
        return bits * 0
    elif WIDTH == 2:
        return (lowest >= 1 << 16).to(tl.int32)
    else:
        half = (lowest >= 1 << 16).to(tl.int32)
        return 2 * half + (lowest >> (16 * half).to(tl.uint32) >= 1 << 8).to(tl.int32)


@triton.jit
def _without(bits, part, WIDTH: tl.constexpr):
    """A word without one of its elements."""
    if WIDTH == 4:
        return bits * 0
    else:
        return bits & ~(((1 << WIDTH * 8) - 1) << (part * WIDTH * 8))


@triton.jit
def _element(words, part, WIDTH: tl.constexpr):
    if WIDTH == 4:
        return words
    else:
        return (words >> (part * WIDTH * 8)) & ((1 << WIDTH * 8) - 1)
