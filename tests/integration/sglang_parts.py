"""What transports use of SGLang's package, for a process that has none: same calls, nothing else.

Handles carry the tensors themselves, and a group is a queue between the two ends in this process.
Both ends of each are here, so that a server that answers like SGLang can take what is sent.
"""

import io
import queue
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

Named = Sequence[tuple[str, Tensor]]


class Bucket:
    """Of one tensor of bytes, and what says where each begins."""

    def __init__(self, named_tensors: Named) -> None:
        self._tensors = named_tensors

    def get_flattened_tensor(self) -> Tensor:
        return torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in self._tensors])

    def get_metadata(self) -> list[tuple[str, torch.dtype, list[int]]]:
        return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self._tensors]


def unflattened(flat: Tensor, described: Sequence[tuple[str, Any, list[int]]]) -> dict[str, Tensor]:
    """The tensors of a bucket; a dtype may be given by its name."""
    tensors, at = {}, 0
    for name, dtype, shape in described:
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        tensors[name] = flat[at : at + size].view(kind).reshape(shape)
        at += size
    return tensors


class Serializer:
    @staticmethod
    def serialize(shared: Any) -> bytes:
        raw = io.BytesIO()
        torch.save(shared, raw)
        return raw.getvalue()

    @staticmethod
    def deserialize(raw: bytes) -> Any:
        return torch.load(io.BytesIO(raw), weights_only=False)


class Group:
    """Of our process and a server: what is broadcast, in order."""

    def __init__(self) -> None:
        self.sent: queue.Queue[Tensor] = queue.Queue()
        self.is_joined = threading.Event()  # by the server


GROUPS: dict[str, Group] = {}


def _join(*, group_name: str, timeout: Any, **_: Any) -> Group:
    group = GROUPS.setdefault(group_name, Group())
    if not group.is_joined.wait(timeout.total_seconds()):
        raise torch.distributed.DistStoreError(f"1 of 2 members joined {group_name}")
    return group


def _broadcast(tensor: Tensor, *, src: int, group: Group) -> None:
    group.sent.put(tensor)


def install(patch: pytest.MonkeyPatch) -> None:
    """In the place of the package, until `patch` is undone."""
    parts: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.utils": {
            "MultiprocessingSerializer": Serializer,
            "init_custom_process_group": _join,
        },
        "sglang.srt.weight_sync": {},
        "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorBucket": Bucket},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    patch.setattr(torch.multiprocessing, "set_sharing_strategy", lambda _: None)
    patch.setattr(torch.distributed, "broadcast", _broadcast)
    patch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    GROUPS.clear()
