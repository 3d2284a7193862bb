"""What was published as numbers: the values that servers must come to, digested one by one."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantise_tensor
from shared.models.deepseek_v4.names import weight_shapes
from shared.quant.policy import scale_name
from shared.weights.effective import value_digest

Canonical = Mapping[str, Tensor]
_MOST_THREADS = 4


def published_names(arch: Architecture) -> list[str]:
    """Of the weights that are sampled with, sorted."""
    return [name for name in sorted(weight_shapes(arch)) if not name.startswith("mtp.")]


def dequantised(canonical: Canonical, name: str) -> Tensor:
    """FP32 values of one weight (int64 for `tid2eid`), whatever its format."""
    scale = canonical.get(scale_name(name)) if name.endswith(".weight") else None
    return dequantise_tensor(name, canonical[name], scale=scale)


def published_digests(
    canonical: Canonical, names: Iterable[str], *, num_threads: int = 1
) -> dict[str, str]:
    """Of the dequantised values of these weights; memory: one tensor of FP32 values a thread.

    Each thread takes whole tensors, for one matrix is too small to be shared. At most
    `_MOST_THREADS`: the interpreter is taken in turns, also with a loop that answers requests.
    """

    def digest(name: str) -> str:
        return value_digest(dequantised(canonical, name).numpy())

    names = list(names)
    threads = min(num_threads, _MOST_THREADS)
    try:
        with ThreadPoolExecutor(threads, "digest", initializer=_exact_alone) as pool:
            return dict(zip(names, pool.map(digest, names), strict=True))
    finally:  # threads that torch meets later get the number that was last set in any
        torch.set_num_threads(torch.get_num_threads())


def _exact_alone() -> None:
    """A thread inherits that its parent flushes denormal values, which no server does."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
