"""Counts the bytes of live tensors, so that a CPU shows what a device would have to hold.

    with MemoryTracker() as tracker: …      tracker.live_bytes, .peak_bytes, .largest_bytes

Every operation's outputs are seen, also those of backward passes; a storage counts once and until
it is freed. Tensors made before the tracker began are not counted.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryTracker(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0  # of a single storage
        self._known: dict[int, int] = {}

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, torch.Tensor):
                self._note(result.untyped_storage())
        return results

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live_bytes += self._known[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, self._known[key])
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)
