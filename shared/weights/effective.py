"""One checksum of what a policy version computes with, independent of how a server lays it out.

xxh3-128 over every weight's name and dequantised values, sorted by name: two servers, or a server
and a fresh load of the same version, agree if and only if they hold the same numbers.
"""

from collections.abc import Iterable

import numpy as np
import xxhash


def effective_checksum(values: Iterable[tuple[str, np.ndarray]]) -> str:
    """32 hexadecimal digits over (release name, FP32 or int64 values), which come sorted by name.

    Scales are folded into their weights before; the values' shape does not count.
    """
    digest = xxhash.xxh3_128()
    last = ""
    for name, array in values:
        if name <= last:
            raise ValueError(f"{name} comes after {last}: names must be sorted and distinct")
        last = name
        wire = "<i8" if np.issubdtype(array.dtype, np.integer) else "<f4"
        digest.update(name.encode() + b"\0")
        digest.update(np.ascontiguousarray(array, wire).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
