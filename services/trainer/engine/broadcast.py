"""Rank 0's operations to all ranks, and their errors back: msgpack over a gloo group of its own.

Waiting for the next operation is normal, so this group's time-out is a year; collectives inside an
operation use Megatron's groups with their own.
"""

from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from shared.errors import LeftHalfway, Rejected
from shared.frames import error_fields

_PATIENCE = timedelta(days=365)


class Broadcast:
    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.size > 1 else None

    def share(self, operation: tuple[str, dict[str, Any]] | None) -> tuple[str, dict[str, Any]]:
        """Rank 0 passes (op, payload), the others None; all get rank 0's."""
        if self._group is None:
            assert operation is not None
            return operation
        op, payload = msgpack.unpackb(self._from(0, msgpack.packb(operation)))
        return op, payload

    def first_error(self, mine: Exception | None) -> Exception | None:
        """This rank's own error, or else that of the lowest rank that had one."""
        if self._group is None:
            return mine
        first = torch.tensor([self.size if mine is None else self._rank])
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self._group)
        if int(first) == self.size:
            return None
        body = self._from(int(first), msgpack.packb(error_fields(mine or Rejected())))
        told = msgpack.unpackb(body)
        kind = LeftHalfway if told["kind"] == LeftHalfway.__name__ else Rejected
        return mine or kind(f"rank {int(first)}: {told['text']}")

    def _from(self, source: int, mine: bytes) -> bytes:
        """The bytes that rank `source` passes."""
        size = torch.tensor([len(mine)])
        dist.broadcast(size, source, group=self._group)
        body = bytearray(mine) if self._rank == source else bytearray(int(size))
        buffer = torch.frombuffer(body, dtype=torch.uint8)
        dist.broadcast(buffer, source, group=self._group)
        return bytes(body)
