"""Tensors grouped for sending: what a server must get in one call stays in one call.

A weight goes with its scale, the two halves of a fused matrix go together (`wq_a` with `wkv`, a
compressor's `wkv` with its `wgate`), so the unit is a module: an attention block, one expert, one
gate. Within a bucket the widest dtype comes first, or integer tables would lie on odd bytes.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

Bucket = list[tuple[str, Tensor]]


def unit_of(name: str) -> str:
    """The module whose tensors are never split: 'layers.0.attn', 'layers.1.ffn.experts.7'."""
    parts = name.split(".")
    return ".".join(parts[: 5 if "experts" in parts[:4] else 3])


def buckets_of(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[Bucket]:
    """Whole units, in order, at most `max_bytes` together unless one alone is larger."""
    units: dict[str, Bucket] = {}
    for name, tensor in tensors.items():
        units.setdefault(unit_of(name), []).append((name, tensor))
    bucket: Bucket = []
    size = 0
    for unit in units.values():
        unit_bytes = sum(tensor.nbytes for _, tensor in unit)
        if bucket and size + unit_bytes > max_bytes:
            yield _widest_first(bucket)
            bucket, size = [], 0
        bucket += unit
        size += unit_bytes
    if bucket:
        yield _widest_first(bucket)


def _widest_first(bucket: Bucket) -> Bucket:
    return sorted(bucket, key=lambda item: -item[1].element_size())
