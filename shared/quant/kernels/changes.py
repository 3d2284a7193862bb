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

CHUNK_BYTES = 1 << 14
CHUNK_WORDS = CHUNK_BYTES // 4
SLOTS = CHUNK_WORDS // 4  # words of a chunk that may differ

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Changes:
    """All changed elements in order, on the tensors' device."""

    at: Tensor  # int64
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
    counts = torch.empty(2, chunks, dtype=torch.int32, device=device)  # words, elements
    with device_of(base):
        if chunks:
            _gather[(chunks,)](
                _words(base),
                _words(new),
                places,
                *pairs,
                *counts,
                words,
                WIDTH=width,
                CHUNK=CHUNK_WORDS,
                SLOTS=SLOTS,
                num_warps=8,
            )
        ends = counts[1].cumsum(0, dtype=torch.int64)
        if not chunks:
            return _nothing(width, device)
        most, total = torch.stack((counts[0].max().long(), ends[-1])).tolist()
        if most > SLOTS:
            return None
        found = Changes(
            torch.empty(total, dtype=torch.int64, device=device),
            torch.empty(total, dtype=_ELEMENTS[width], device=device),
            torch.empty(total, dtype=_ELEMENTS[width], device=device),
        )
        if total:
            _spread[(chunks,)](
                places,
                *pairs,
                *counts,
                ends,
                found.at,
                found.old,
                found.new,
                WIDTH=width,
                CHUNK=CHUNK_WORDS,
                SLOTS=SLOTS,
                BLOCK=256,
                num_warps=4,
            )
    return found


def _words(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8).view(torch.int32)


def _nothing(width: int, device: torch.device) -> Changes:
    values = torch.empty(0, dtype=_ELEMENTS[width], device=device)
    return Changes(torch.empty(0, dtype=torch.int64, device=device), values, values)


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
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + place < words
    was = tl.load(base + chunk * CHUNK + place, mask=inside, other=0)
    now = tl.load(new + chunk * CHUNK + place, mask=inside, other=0)
    differs = (was != now).to(tl.int32)
    rank = tl.cumsum(differs, 0) - 1
    slot = chunk * SLOTS + rank
    kept = (was != now) & (rank < SLOTS)
    tl.store(places + slot, place.to(tl.int16), mask=kept)
    tl.store(olds + slot, was, mask=kept)
    tl.store(news + slot, now, mask=kept)
    tl.store(num_words + chunk, tl.sum(differs, 0))
    tl.store(num_elements + chunk, tl.sum(_differing(was ^ now, WIDTH), 0))


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
    num_words,
    num_elements,
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
    count = tl.load(num_words + chunk)
    begin = tl.load(ends + chunk) - tl.load(num_elements + chunk)
    part = tl.arange(0, PER_WORD)[None, :]
    start = 0
    while start < count:
        number = start + tl.arange(0, BLOCK)
        inside = number < count
        slot = chunk * SLOTS + number
        place = tl.load(places + slot, mask=inside, other=0).to(tl.int64)
        was = _elements(tl.load(olds + slot, mask=inside, other=0)[:, None], part, WIDTH)
        now = _elements(tl.load(news + slot, mask=inside, other=0)[:, None], part, WIDTH)
        position = (chunk * CHUNK + place)[:, None] * PER_WORD + part
        differs = (was != now).to(tl.int32)
        before = tl.cumsum(tl.sum(differs, 1), 0) - tl.sum(differs, 1)
        rank = begin + before[:, None] + tl.cumsum(differs, 1) - 1
        tl.store(at + rank, position, mask=was != now)
        tl.store(old + rank, was.to(old.dtype.element_ty), mask=was != now)
        tl.store(new + rank, now.to(new.dtype.element_ty), mask=was != now)
        begin += tl.sum(tl.sum(differs, 1), 0)
        start += BLOCK


@triton.jit
def _elements(words, part, WIDTH: tl.constexpr):
    if WIDTH == 4:
        return words + part * 0
    else:
        return (words >> (part * WIDTH * 8)) & ((1 << WIDTH * 8) - 1)
