"""Where two tensors differ, and what stands there: the part of a delta that reads every byte.

Two passes. The first compares 32-bit words, a chunk of them to a program, and gathers those that
differ in the chunk's own slots; the second takes them apart into elements, in order. So both
tensors are read once, and nothing is written but what has changed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.quant.kernels.launch import device_of, number_of

ROWS = 8  # of 128 words, a tile: each row is one warp's
TILES = 16  # of a chunk; they are loaded ahead
CHUNK_WORDS = 128 * ROWS * TILES
SLOTS = CHUNK_WORDS // 4  # words of a chunk that may differ
_OVERFULL = 1 << 40  # elements of a chunk with too few slots, as it tells: more than there is room

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
    places = torch.empty(chunks * SLOTS, dtype=torch.int16, device=device)
    slots = (places, *torch.empty(2, chunks * SLOTS, dtype=torch.int32, device=device))
    num_words = torch.empty(chunks, dtype=torch.int32, device=device)
    num_elements = torch.empty(chunks, dtype=torch.int64, device=device)
    with device_of(base):
        _gather[(chunks,)](
            _words(base),
            _words(new),
            *slots,
            num_words,
            num_elements,
            words,
            WIDTH=width,
            ROWS=ROWS,
            TILES=TILES,
            SLOTS=SLOTS,
            OVERFULL=_OVERFULL,
            num_warps=4,
        )
        ends = num_elements.cumsum(0)
        # The second pass is there before the number is: the device never waits for the host.
        total = number_of(ends[-1])
        room = min(base.numel(), max(base.numel() // 8, _LEAST_ROOM))
        found = _room(room, base)
        _spread[(chunks,)](
            *slots,
            num_words,
            num_elements,
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
        count = total()
    if count > room:
        return None
    return Changes(found.at[:count], found.old[:count], found.new[:count])


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
    places,
    olds,
    news,
    num_words,
    num_elements,
    words,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERFULL: tl.constexpr,
):
    TILE: tl.constexpr = ROWS * 128
    chunk = tl.program_id(0).to(tl.int64)
    start, first = chunk * TILE * TILES, chunk * SLOTS
    left = tl.minimum(words - start, TILE * TILES).to(tl.int32)
    base, new = base + start, new + start
    places, olds, news = places + first, olds + first, news + first
    within = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    found, marks = 0, tl.zeros((ROWS, 128), tl.int32)
    for tile in tl.range(0, TILES, num_stages=3):
        place = tile * TILE + within
        was = tl.load(base + place, mask=place < left, other=0)
        now = tl.load(new + place, mask=place < left, other=0)
        # A row is ranked within its warp; only the sums of rows are added up across warps.
        differs = (was != now).to(tl.int32)
        rows = tl.sum(differs, 1)
        slot = (tl.cumsum(rows, 0) - rows)[:, None] + tl.cumsum(differs, 1) + (found - 1)
        # These hints are not true, and harmless, since the mask keeps stores apart: they only make
        # the compiler store from where it loaded to; else all goes through shared memory first.
        slot = tl.max_contiguous(tl.multiple_of(slot, (1, 4)), (1, 4))
        found += tl.sum(rows, 0)
        kept = (was != now) & (found <= SLOTS)
        tl.store(places + slot, place.to(tl.int16), mask=kept)
        tl.store(olds + slot, was, mask=kept)
        tl.store(news + slot, now, mask=kept)
        marks += _marks(was ^ now, WIDTH)
    elements = tl.sum(tl.sum(_count(marks, WIDTH), 1), 0)
    tl.store(num_words + chunk, found)
    tl.store(num_elements + chunk, tl.where(found > SLOTS, OVERFULL, elements.to(tl.int64)))


@triton.jit
def _marks(bits, WIDTH: tl.constexpr):
    """The lowest bit of each element of a word that has any bit set."""
    bits = bits.to(tl.uint32, bitcast=True)
    if WIDTH == 4:
        return (bits != 0).to(tl.int32)
    elif WIDTH == 2:
        return ((((bits & 0x7FFF7FFF) + 0x7FFF7FFF) | bits) >> 15 & 0x00010001).to(tl.int32)
    else:
        return ((((bits & 0x7F7F7F7F) + 0x7F7F7F7F) | bits) >> 7 & 0x01010101).to(tl.int32)


@triton.jit
def _count(marks, WIDTH: tl.constexpr):
    """Of the marks of one word, or of up to 255 words, added up."""
    if WIDTH == 4:
        return marks
    elif WIDTH == 2:
        return (marks + (marks >> 16)) & 0xFFFF
    else:
        halves = (marks & 0x00FF00FF) + (marks >> 8 & 0x00FF00FF)
        return (halves + (halves >> 16)) & 0xFFFF


@triton.jit
def _spread(
    places,
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
    places, olds, news = places + chunk * SLOTS, olds + chunk * SLOTS, news + chunk * SLOTS
    number = tl.arange(0, BLOCK)
    place, was, now = _words_of(places, olds, news, number, SLOTS)
    end, left = tl.load(ends + chunk), tl.load(num_words + chunk)
    if end > room:
        left = 0
    first = end - tl.load(num_elements + chunk)
    at, old, new = at + first, old + first, new + first
    start = (chunk * CHUNK * PER_WORD).to(at.dtype.element_ty)
    done = 0
    while left > 0:
        # The next words are on their way while these are taken apart.
        number += BLOCK
        next_place, next_was, next_now = _words_of(places, olds, news, number, SLOTS)
        rest = tl.where(tl.arange(0, BLOCK) < left, was ^ now, 0)
        count = _count(_marks(rest, WIDTH), WIDTH)
        rank = done + tl.cumsum(count, 0) - count
        done += tl.sum(count, 0)
        position = start + place.to(tl.int32) * PER_WORD
        # Of most words one element differs: the first of each, then of those that have another.
        turns = tl.max(count, 0)
        while turns > 0:
            part = _first(rest, WIDTH)
            one, two = _element(was, part, WIDTH), _element(now, part, WIDTH)
            tl.store(at + rank, position + part, mask=rest != 0)
            tl.store(old + rank, one.to(old.dtype.element_ty), mask=rest != 0)
            tl.store(new + rank, two.to(new.dtype.element_ty), mask=rest != 0)
            rest = _without(rest, part, WIDTH)
            rank += 1
            turns -= 1
        left -= BLOCK
        place, was, now = next_place, next_was, next_now


@triton.jit
def _words_of(places, olds, news, number, SLOTS: tl.constexpr):
    inside = number < SLOTS
    place = tl.load(places + number, mask=inside, other=0)
    return (
        place,
        tl.load(olds + number, mask=inside, other=0),
        tl.load(news + number, mask=inside, other=0),
    )


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
