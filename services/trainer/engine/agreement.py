"""What ranks tell each other outside tensors: bytes, and that one of them has failed.

A rank that fails alone would leave the others waiting in their next collective. What can fail on
one rank only runs inside `together`: then all fail, with the error of the first that did.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from services.trainer.megatron import cpu
from shared.errors import WeightsCorrupt


def gather_bytes(mine: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order: padded to the longest for the trip."""
    if dist.get_world_size() == 1:
        return [mine]
    device = cpu.device()
    size = torch.tensor([len(mine)], device=device)
    sizes = torch.empty(dist.get_world_size(), dtype=size.dtype, device=device)
    dist.all_gather_into_tensor(sizes, size)
    longest = int(sizes.max())
    if longest == 0:
        return [b""] * len(sizes)
    body = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    bodies = torch.empty(longest * len(sizes), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(bodies, body)
    rows = bodies.cpu().view(len(sizes), longest)
    return [
        row[:length].numpy().tobytes() for row, length in zip(rows, sizes.tolist(), strict=True)
    ]


@contextmanager
def together() -> Iterator[None]:
    """Each rank does its own part inside, without collectives; all raise if one could not.

    ValueError and WeightsCorrupt are shared: a rank that was well raises a ValueError that names
    the first rank that was not. Anything else ends its process, and with it all ranks.
    """
    error: ValueError | WeightsCorrupt | None = None
    try:
        yield
    except (ValueError, WeightsCorrupt) as err:
        error = err
    texts = gather_bytes(b"" if error is None else str(error).encode() or b"?")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise ValueError(f"rank {rank}: {text.decode()}")
