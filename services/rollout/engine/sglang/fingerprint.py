"""The effective checksum of a version that a server holds in its own layout.

It is that of what was published; the probe speaks for the layout. Threads dequantise whole tensors
ahead of the digest, which takes them in order: one matrix is too small to be shared by threads.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from services.rollout.models.deepseek_v4_weights import dequantised, published_names
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.effective import effective_checksum

_MOST = 4


def checksum_of(
    arch: Architecture, canonical: Mapping[str, Tensor], *, num_threads: int = 1
) -> str:
    """Memory: two tensors of FP32 values a thread. Sets torch's threads to 1.

    At most `_MOST` threads: the interpreter is taken in turns, also with the loop that passes
    requests on to the server.
    """
    num_threads = min(num_threads, _MOST)
    pool = ThreadPoolExecutor(
        num_threads, "dequantise", initializer=torch.set_num_threads, initargs=(1,)
    )
    with pool:
        return effective_checksum(_values(arch, canonical, pool, ahead=2 * num_threads))


def _values(
    arch: Architecture, canonical: Mapping[str, Tensor], pool: ThreadPoolExecutor, *, ahead: int
) -> Iterator[tuple[str, np.ndarray]]:
    waiting: deque[tuple[str, Future[Tensor]]] = deque()
    for name in published_names(arch):
        waiting.append((name, pool.submit(dequantised, canonical, name)))
        if len(waiting) == ahead:
            done, value = waiting.popleft()
            yield done, value.result().numpy()
    for done, value in waiting:
        yield done, value.result().numpy()
