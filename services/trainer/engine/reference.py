"""The frozen reference policy: the weights before the first step of reinforcement, put in place
for a pass.

Each rank keeps its own part in host memory (one copy of its parameters and buffers in their dtype,
and during the pass a second one of the weights that are being trained), so that any layout has a
reference at no cost in device memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferencePolicy:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = self._copies()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is the reference; afterwards it has its own weights, bit for bit."""
        own = self._copies()
        try:
            self._put(self._kept)
            yield
        finally:
            self._put(own)

    def _copies(self) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():  # in place, since the optimiser's buffers hold views of them
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(value)

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]
