"""Speed of memory-bound work as a share of what a plain copy reaches on the same device."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

COPY_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes that must be read and written at least, each once, over the median time."""

    milliseconds: float
    gigabytes_per_s: float
    share_of_copy: float

    def as_dict(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def rate(run: Callable[[], object], *, num_bytes: int) -> Rate:
    milliseconds = median_ms(run)
    speed = num_bytes / milliseconds / 1e6
    return Rate(milliseconds, speed, speed / copy_speed())


@cache
def copy_speed() -> float:
    """GB/s, read plus written, of a device-to-device copy that no cache holds."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) / 1e6


def median_ms(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    found: float = do_bench(run, warmup=10, rep=100, return_mode="median")
    return found


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
