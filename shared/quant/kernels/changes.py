"""Where two tensors differ, and what stands there: the part of a delta that reads every byte.

Two passes. The first compares 32-bit words, a chunk of them to a program, and gathers those that
differ in the chunk's own slots; the second takes the words apart into elements, in order. So both
tensors are read once, and nothing is written but what has changed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.quant.kernels.launch import device_of

ROWS = 16  # of 128 words, each one warp's
CHUNK_WORDS = 128 * ROWS
SLOTS = CHUNK_WORDS // 4  # words of a chunk that may differ

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


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
    """Elements that differ in their bytes; None if a chunk has more of them than slots.

    Both tensors are what `supports` accepts, with one shape and dtype.
    """
    width = base.element_size()
    words = base.numel() * width // 4
    chunks = triton.cdiv(words, CHUNK_WORDS)
    device = base.device
    places = torch.empty(chunks * SLOTS, dtype=torch.int16, device=device)
    pairs = torch.empty(2, chunks * SLOTS, dtype=torch.int32, device=device)
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    if not chunks:
        return _room(0, base)
    with device_of(base):
        _gather[(chunks,)](
            _words(base),
            _words(new),
            places,
            *pairs,
            counts,
            words,
            WIDTH=width,
            ROWS=ROWS,
            SLOTS=SLOTS,
            num_warps=4,
        )
        ends = (counts >> 16).cumsum(0, dtype=torch.int64)
        most, total = torch.stack(((counts & 0xFFFF).amax().long(), ends[-1])).tolist()
        if most > SLOTS:
            return None
        found = _room(total, base)
        if total:
            _spread[(chunks,)](
                places,
                *pairs,
                counts,
                ends,
                found.at,
                found.old,
                found.new,
                WIDTH=width,
                CHUNK=CHUNK_WORDS,
                SLOTS=SLOTS,
                BLOCK=64,
                num_warps=1,
            )
    return found


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
    counts,
    words,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    start = chunk * ROWS * 128
    inside = place < words - start
    was = tl.load(base + start + place, mask=inside, other=0)
    now = tl.load(new + start + place, mask=inside, other=0)
    differs = (was != now).to(tl.int32)
    # Words and elements are counted at once, in the halves of one number. A row is ranked within
    # its warp; only the sums of rows are added up across warps.
    sums = tl.sum(differs | (_differing(was ^ now, WIDTH) << 16), 1)
    before = (tl.cumsum(sums, 0) - sums) & 0xFFFF
    # These hints are not true, and harmless, since the mask keeps stores apart: they only make the
    # compiler store from where it loaded to; else all goes through shared memory first.
    rank = before[:, None] + tl.cumsum(differs, 1) - 1
    rank = tl.max_contiguous(tl.multiple_of(rank, (1, 4)), (1, 4))
    kept = (was != now) & (rank < SLOTS)
    tl.store(places + chunk * SLOTS + rank, place.to(tl.int16), mask=kept)
    tl.store(olds + chunk * SLOTS + rank, was, mask=kept)
    tl.store(news + chunk * SLOTS + rank, now, mask=kept)
    tl.store(counts + chunk, tl.sum(sums, 0))


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
    places,
    olds,
    news,
    counts,
    ends,
    at,
    old,
    new,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PER_WORD: tl.constexpr = 4 // WIDTH
    chunk = tl.program_id(0).to(tl.int64)
    both = tl.load(counts + chunk)
    count = both & 0xFFFF
    begin = tl.load(ends + chunk) - (both >> 16)
    part = tl.arange(0, PER_WORD)[None, :]
    start = 0
    while start < count:
        number = start + tl.arange(0, BLOCK)
        inside = number < count
        place = tl.load(places + chunk * SLOTS + number, mask=inside, other=0).to(tl.int32)
        was = tl.load(olds + chunk * SLOTS + number, mask=inside, other=0)
        now = tl.load(news + chunk * SLOTS + number, mask=inside, other=0)
        was, now = _elements(was[:, None], part, WIDTH), _elements(now[:, None], part, WIDTH)
        position = chunk * CHUNK * PER_WORD + (place[:, None] * PER_WORD + part)
        differs = (was != now).to(tl.int32)
        sums = tl.sum(differs, 1)
        rank = (tl.cumsum(sums, 0) - sums)[:, None] + tl.cumsum(differs, 1) - 1
        tl.store(at + begin + rank, position.to(at.dtype.element_ty), mask=was != now)
        tl.store(old + begin + rank, was.to(old.dtype.element_ty), mask=was != now)
        tl.store(new + begin + rank, now.to(new.dtype.element_ty), mask=was != now)
        begin += tl.sum(sums, 0)
        start += BLOCK


@triton.jit
def _elements(words, part, WIDTH: tl.constexpr):
    if WIDTH == 4:
        return words + part * 0
    else:
        return (words >> (part * WIDTH * 8)) & ((1 << WIDTH * 8) - 1)
