"""How a version's tensors reach the server: its own disk, shared memory, or a process group.

All three send the same folder's tensors and end with the caches flushed. Only the dialect around
them makes the new weights whole; only the probe says that they are.
"""

import asyncio
import base64
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from services.rollout.engine.sglang import reach
from services.rollout.engine.sglang.buckets import Bucket, buckets_of
from services.rollout.engine.sglang.checkpoint import dtype_name, read_folder
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.spec import TransportName
from shared.errors import ConfigInvalid, DeadlineExceeded
from shared.process import free_port

BUCKET_BYTES = 2**30
NCCL_MEMORY = "NCCL_CUMEM_ENABLE"  # SGLang sets it to 0 for its own processes
_GROUP = "tandem-update"


class Transport(Protocol):
    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        """Hand a folder's tensors over; `ServerRefused` when the server does not take them."""


def transport_of(name: TransportName) -> Transport:
    """ConfigInvalid where this process lacks a setting that its side of the transport needs."""
    if name == "disk":
        return Disk()
    if name == "tensor":
        return SharedMemory()
    if name == "nccl":
        _check_nccl()
    return ProcessGroup(name)


def _check_nccl() -> None:
    """Members that allocate their buffers in different ways wait for each other for good."""
    if (found := os.environ.get(NCCL_MEMORY)) != "0":
        raise ConfigInvalid(
            f"transport = nccl needs {NCCL_MEMORY}=0 in the environment of the rollout service, as "
            f"SGLang has it; it is {'unset' if found is None else repr(found)}, and the first "
            "broadcast would hang"
        )


class Disk:
    """The server reads the folder itself: both sides see the same files."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        body = {"model_path": str(folder), "flush_cache": True, "abort_all_requests": False}
        await client.change("/update_weights_from_disk", body, timeout_s=timeout_s)


class SharedMemory:
    """Handles of tensors that both processes of one host can map (CUDA IPC on a GPU)."""

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        tensors = await asyncio.to_thread(read_folder, folder)
        ranks = await _num_ranks(client)
        for bucket in buckets_of(tensors, max_bytes=BUCKET_BYTES):
            await send_bucket(client, bucket, ranks=ranks, timeout_s=timeout_s)


async def _num_ranks(client: SGLangClient) -> int:
    """Processes of the server that each take the tensors."""
    return int((await client.info()).get("tp_size") or 1)


async def send_bucket(
    client: SGLangClient, bucket: Bucket, *, ranks: int = 1, timeout_s: float
) -> None:
    """One call with a handle for each rank of tensors that the server maps."""
    handles, _held = await asyncio.to_thread(_shared_handles, bucket, ranks)
    body = {
        "serialized_named_tensors": handles,
        "load_format": "flattened_bucket",
        "flush_cache": True,
    }
    await client.change("/update_weights_from_tensor", body, timeout_s=timeout_s)


def _shared_handles(bucket: Bucket, ranks: int) -> tuple[list[str], dict[str, Any]]:
    """The handles, and what must live until the server has mapped it.

    A rank opens the handle at its own place, and each handle once: its owner counts who did.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if torch.cuda.is_available():
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        bucket = [(name, tensor.cuda()) for name, tensor in bucket]
    else:
        # With the default strategy the server would ask this process for descriptors, unauthorised.
        torch.multiprocessing.set_sharing_strategy("file_system")
    flat = FlattenedTensorBucket(named_tensors=bucket)
    shared = {
        "flattened_tensor": flat.get_flattened_tensor(),
        "metadata": flat.get_metadata(),
    }
    serialize = MultiprocessingSerializer.serialize
    return [base64.b64encode(serialize(shared)).decode() for _ in range(ranks)], shared


class ProcessGroup:
    """Broadcast through a group of this process and the server's ranks (gloo, NCCL, RCCL).

    NCCL wants a GPU for each member: this process takes its first, so the server gets others
    (`--base-gpu-id`).
    """

    load_format: str | None = "flattened_bucket"

    def __init__(self, backend: TransportName) -> None:
        self._backend = backend

    async def send(self, client: SGLangClient, folder: Path, *, timeout_s: float) -> None:
        tensors = await asyncio.to_thread(read_folder, folder)
        group = await self._join(client, timeout_s)
        try:
            for bucket in buckets_of(tensors, max_bytes=BUCKET_BYTES):
                await self._broadcast(client, group, bucket, timeout_s)
        finally:
            await self._leave(client, group, timeout_s)

    def messages(self, bucket: Bucket) -> list[Tensor]:
        """What is broadcast for one call, in order: the whole bucket as bytes."""
        return [torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])]

    async def _join(self, client: SGLangClient, timeout_s: float) -> Any:
        from datetime import timedelta

        from sglang.srt.utils import init_custom_process_group

        ranks = await _num_ranks(client)
        port, address = free_port(), await asyncio.to_thread(reach.own_address, client.url)
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": _GROUP,
            "backend": self._backend,
        }
        _, group = await asyncio.gather(
            client.change("/init_weights_update_group", body, timeout_s=timeout_s),
            asyncio.to_thread(
                init_custom_process_group,
                backend=self._backend,
                init_method=f"tcp://{where}",
                world_size=ranks + 1,
                rank=0,
                group_name=_GROUP,
                timeout=timedelta(seconds=timeout_s),
            ),
        )
        return group

    async def _leave(self, client: SGLangClient, group: Any, timeout_s: float) -> None:
        """Both sides at once: the end of an NCCL group waits for the members on its host."""
        end = {"group_name": _GROUP}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(
                    client.change("/destroy_weights_update_group", end, timeout_s=timeout_s),
                    asyncio.to_thread(torch.distributed.destroy_process_group, group),
                )
        except TimeoutError as err:
            raise DeadlineExceeded("the update's process group to end", timeout_s) from err

    async def _broadcast(
        self, client: SGLangClient, group: Any, bucket: Bucket, timeout_s: float
    ) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": _GROUP,
            "flush_cache": True,
            "load_format": self.load_format,
        }
        path = "/update_weights_from_distributed"
        await asyncio.gather(
            client.change(path, body, timeout_s=timeout_s),
            asyncio.to_thread(self._send_all, group, bucket),
        )

    def _send_all(self, group: Any, bucket: Bucket) -> None:
        device = "cuda" if self._backend == "nccl" else "cpu"
        for message in self.messages(bucket):
            torch.distributed.broadcast(message.to(device), src=0, group=group)
