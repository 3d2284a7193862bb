"""What every fused kernel needs around its launch.

A kernel never raises: it sets a flag where it met a value that its format refuses, and the plain
code, run on the same tensors, words the refusal. Reading the flag waits for the kernel.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Triton's interpreter runs kernels on the CPU, for tests. It rounds to E4M3 half up, not to even.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def new_flag(like: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def matrices(tensor: Tensor) -> Tensor:
    """`[G, N, K]` of `[..., N, K]`, whose last dim is contiguous: a view where strides allow it."""
    *lead, rows, columns = tensor.shape
    stack = tensor.reshape(math.prod(lead), rows, columns)
    return stack if stack.stride(-1) == 1 else stack.contiguous()


def number_of(tensor: Tensor) -> Callable[[], int]:
    """Have an integer sent to the host; the call waits for it, and for nothing launched since."""
    if not tensor.is_cuda:
        return lambda: int(tensor)
    sent, arrived = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record()

    def wait() -> int:
        arrived.synchronize()
        return int(sent)

    return wait
