"""Mistakes in what a sampler keeps of a sequence between two steps: one prefill is right with them.

They show where a sequence goes on: in decoding, after a chunk, in a copy of its prompt's slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.rollout.models.deepseek_v4_cache import Cache, LayerCache
from tests.parity.mutations import Plant, function_changed


@dataclass(frozen=True, slots=True)
class StateMutation:
    """`at` is what the walk must say of steps against one prefill."""

    at: str
    plant: Plant


def _window_one_place_off() -> Plant:
    def make(route: Callable) -> Callable:
        def wrong(self: Cache, ratio: int, slots: Any, positions: Any, num: int) -> Any:
            right = route(self, ratio, slots, positions, num)
            late = route(self, ratio, slots, positions + 1, num)
            return replace(right, write_to=late.write_to)

        return wrong

    return function_changed(Cache, "_decode_route", make)


def _open_block_lost() -> Plant:
    """A prefill leaves the rows of its last, unfinished block to nobody."""

    def make(compression: Callable) -> Callable:
        def wrong(self: Cache, ratio: int, *given: Any) -> Any:
            right = compression(self, ratio, *given)
            nobody = torch.full_like(right.ring_to, self.num_slots * self._ring_size(ratio))
            return replace(right, ring_to=nobody)

        return wrong

    return function_changed(Cache, "_prefill_compression", make)


def _block_before_forgotten() -> Plant:
    def make(emission: Callable) -> Callable:
        def wrong(self: Cache, ratio: int, *given: Any) -> Any:
            right = emission(self, ratio, *given)
            if right is None or not self._selects(ratio):
                return right
            return replace(right, has_no_past=torch.ones(len(right.key_rows), dtype=torch.bool))

        return wrong

    return function_changed(Cache, "_decode_emission", make)


def _copied_without(which: slice) -> Plant:
    """Of a layer's tensors: keys, the open block's rows, the indexer's entries."""

    def plant(wrong: Any) -> None:
        whole = LayerCache.tensors.fget
        assert whole is not None

        def rest(cache: LayerCache) -> list[Tensor]:
            tensors = whole(cache)
            del tensors[which]
            return tensors

        wrong.patch.setattr(LayerCache, "tensors", property(rest))

    return plant


STATE_MUTATIONS: dict[str, StateMutation] = {
    "window key one place off": StateMutation("layer 0 · attention core", _window_one_place_off()),
    "open block lost after a prefill": StateMutation("layer 2 · compressor", _open_block_lost()),
    "block before forgotten": StateMutation("layer 2 · compressor", _block_before_forgotten()),
    "copied without keys": StateMutation("layer 0 · attention core", _copied_without(slice(0, 1))),
    "copied without its open block": StateMutation(
        "layer 2 · compressor", _copied_without(slice(1, 2))
    ),
    "copied without indexer's entries": StateMutation(
        "layer 2 · indexer", _copied_without(slice(2, 3))
    ),
}
