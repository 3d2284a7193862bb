"""One checksum of what a policy version computes with, independent of how a server lays it out.

xxh3-128 over every weight's name and the digest of its dequantised values, sorted by name: two
servers, or a server and a fresh load of the same version, agree if and only if they hold the same
numbers. Whoever has some of the weights can digest those: a thread, or a rank.
"""

from collections.abc import Mapping

import numpy as np
import xxhash


def value_digest(array: np.ndarray) -> str:
    """xxh3-128, hexadecimal, of one weight's FP32 or int64 values; their shape does not count.

    Scales are folded in before.
    """
    wire = "<i8" if np.issubdtype(array.dtype, np.integer) else "<f4"
    values = np.ascontiguousarray(array, wire).reshape(-1)
    return xxhash.xxh3_128_hexdigest(values.view(np.uint8).data)


def effective_checksum(digests: Mapping[str, str]) -> str:
    """32 hexadecimal digits over the digests of all weights by release name, in any order."""
    whole = xxhash.xxh3_128()
    for name in sorted(digests):
        whole.update(f"{name}\0{digests[name]}\0".encode())
    return whole.hexdigest()
