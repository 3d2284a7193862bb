"""Weights to SGLang servers by every transport: alone on quiet servers, then whole transactions.

    first:  starts with A on the last of two GPUs, or the only one
    second: starts with B on GPU 0, where this process sends from

NCCL needs two GPUs; the rest runs on one, too. State is compared with fresh loads.
"""

import asyncio
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.rollout.engine.sglang.buckets import Bucket
from services.rollout.engine.sglang.transports import (
    NCCL_MEMORY,
    Disk,
    ProcessGroup,
    SharedMemory,
    Transport,
    transport_of,
)
from shared.process import free_port
from shared.weights.group import send_shards
from shared.weights.manifest import Manifest, ShardEntry, shard_file
from shared.weights.protocol import GroupTransfer
from tests.gpu.releases import SINGLE
from tests.gpu.sglang_world import Driven, Place, Staged, World, running
from tests.gpu.test_sglang import FLOOR, departure, is_exact, refused
from tests.integration.test_weight_forwarding import Peer
from tests.integration.test_weight_forwarding import World as Pulling

Figures = dict[str, Any]
MEMBER_S = 90.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang"),
]
NUM_GPUS = torch.cuda.device_count()
NEEDS_TWO = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs, here are {NUM_GPUS}")


class Plain(ProcessGroup):
    """A broadcast for each tensor. NCCL lacks E8M0: those scales travel in FP32, exactly."""

    load_format = None

    def messages(self, bucket: Bucket) -> list[torch.Tensor]:
        return [tensor for _, tensor in bucket]

    async def _broadcast(self, client: Any, group: Any, bucket: Bucket, timeout_s: float) -> None:
        sent = [
            (name, tensor.float() if tensor.dtype == torch.float8_e8m0fnu else tensor)
            for name, tensor in bucket
        ]
        await super()._broadcast(client, group, sent, timeout_s)


Which = Literal["first", "second"]
TRANSPORTS: dict[str, tuple[Which, Callable[[], Transport], str]] = {
    "CUDA IPC, own GPU": ("second", SharedMemory, "AB"),
    "disk": ("first", Disk, "BA"),
    "NCCL, flattened": ("first", lambda: ProcessGroup("nccl"), "BAB"),
    "NCCL, plain": ("first", lambda: Plain("nccl"), "AB"),
}
"""Server, transport, and the versions of its updates, each another than the one before."""
NAMES = [pytest.param(one, marks=NEEDS_TWO if "NCCL" in one else ()) for one in TRANSPORTS]


@pytest.fixture(scope="module", autouse=True)
def _as_sglang_sets_it() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NCCL_MEMORY, "0")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("sglang")
    first_at = Place("disk", gpu=min(1, NUM_GPUS - 1))
    async with running(folder, first_at, Place("tensor")) as found:
        kept = figures.setdefault("sglang", {})
        kept["seconds_to_first_token"] = [found.first.start_s, found.second.start_s]
        kept["release_gb"] = found.staged["A"].num_bytes / 1e9
        kept["A against B"] = departure(found.first.fresh, found.second.fresh)
        yield found


@pytest.mark.parametrize("name", NAMES)
async def test_what_a_transport_takes(name: str, world: World, figures: Figures) -> None:
    """Both versions twice, ending with the server's own; then its scores are a fresh load's."""
    which, transport, _ = TRANSPORTS[name]
    own, other = (world.first, world.second) if which == "first" else (world.second, world.first)
    there_and_back = 2 * (other.first, own.first)
    seconds = [round(await own.load(folder, transport()), 3) for folder in there_and_back]
    size = world.staged["A"].num_bytes / 1e9
    after = await own.scores()
    figures["sglang"].setdefault("sends", {})[name] = {
        "seconds": seconds,
        "gb_per_s": round(size / min(seconds), 2),
        "short texts are a fresh load's": is_exact(after, own.fresh),
        "against a fresh load": departure(after, own.fresh),
    }
    assert is_exact(after, own.fresh)
    assert departure(after, own.fresh)["mean"] < FLOOR


@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=NEEDS_TWO), "gloo"])
async def test_a_version_moves_in_a_group(
    backend: Literal["nccl", "gloo"], world: World, tmp_path: Path, figures: Figures
) -> None:
    """As ranks send it to a service of rollout: three groups, the first with all that is new."""
    staged = world.staged["A"]
    groups = [_group(f"group-{number}", backend) for number in range(3)]
    member = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gpu.group_member"),
        *(str(staged.folder), str(tmp_path)),
        *(group.model_copy(update={"rank": 1}).model_dump_json() for group in groups),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(NUM_GPUS - 1)},
    )
    seconds = []
    try:
        async with asyncio.timeout(MEMBER_S):
            for group in groups:
                began_s = time.monotonic()
                await asyncio.to_thread(_send, group, staged)
                seconds.append(round(time.monotonic() - began_s, 3))
            assert await member.wait() == 0
    finally:
        if member.returncode is None:
            member.kill()
    figures["sglang"].setdefault("staging", {})[f"{backend} group"] = {
        "seconds": seconds,
        "gb_per_s": round(staged.num_bytes / 1e9 / min(seconds), 2),
    }
    await asyncio.to_thread(_check, staged, tmp_path / groups[-1].name)
    await asyncio.to_thread(shutil.rmtree, tmp_path)


async def test_a_version_is_pulled_over_http(
    world: World, tmp_path: Path, figures: Figures
) -> None:
    staged = world.staged["A"]
    pulling = Pulling(tmp_path, {0: staged.folder})
    peers = [Peer(f"server-{number}", tmp_path, max_bytes=2**34) for number in range(2)]
    seconds = []
    try:
        for peer in peers:
            peer.engine.spec.arch = SINGLE
            began_s = time.monotonic()
            pulling.begin(peer, 0, sources=[pulling.url])
            await pulling.staged(peer, 0)
            seconds.append(round(time.monotonic() - began_s, 3))
    finally:
        for peer in peers:
            await peer.close()
        await asyncio.to_thread(pulling.trainer.close)
    figures["sglang"].setdefault("staging", {})["http"] = {
        "seconds": seconds,
        "gb_per_s": round(staged.num_bytes / 1e9 / min(seconds), 2),
    }
    await asyncio.to_thread(shutil.rmtree, tmp_path)


@pytest.mark.parametrize("name", NAMES)
async def test_updates_equal_a_fresh_load(name: str, world: World, figures: Figures) -> None:
    which, transport, versions = TRANSPORTS[name]
    driven: Driven = getattr(world, which)
    driven.versions.transport = transport()
    kept = figures["sglang"].setdefault("updates", {})[name] = []
    for version in versions:
        scores, checksums = world.fresh(version)
        number = 1 + (driven.versions.engine.policy_version or 0)
        told = await driven.activate(world.staged[version], number, probed_as=scores)
        found, after = await driven.checksums(), await driven.scores()
        told |= {
            "version": version,
            "short texts are a fresh load's": is_exact(after, scores),
            "scores against a fresh load": departure(after, scores),
            "checksums": len(checksums),
            "checksums that differ": [key for key in checksums if found.get(key) != checksums[key]],
            "restarts": driven.versions.restarts.total,
        }
        kept.append(told)
    assert all(one["short texts are a fresh load's"] for one in kept)
    assert all(one["scores against a fresh load"]["mean"] < FLOOR for one in kept)
    assert all(not one["checksums that differ"] for one in kept)
    assert kept[0]["checksums"] > 50
    assert driven.versions.restarts.total == 0


async def test_nccl_on_the_servers_own_gpu_is_refused(world: World, figures: Figures) -> None:
    """A GPU holds one member of a group: both sides are told so, and the old version serves."""
    kept = figures["sglang"].setdefault("faults", {})
    by = transport_of("nccl")
    kept["NCCL, own GPU"] = await refused(world.second, world, "B", sent="A", probed_as="A", by=by)


def _group(name: str, backend: Literal["nccl", "gloo"]) -> GroupTransfer:
    return GroupTransfer(
        name=name,
        backend=backend,
        host="127.0.0.1",
        port=free_port(),
        rank=0,
        members=["rank 0", "rollout-0"],
        deadline_s=60.0,
    )


def _send(group: GroupTransfer, staged: Staged) -> None:
    def read(shard: ShardEntry) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(staged.folder / shard_file(shard.index), np.uint8))

    send_shards(group, staged.manifest, read)


def _check(staged: Staged, folder: Path) -> None:
    """What arrived is what was sent, to the byte."""
    manifest: Manifest = staged.manifest
    for shard in manifest.shards:
        name = shard_file(shard.index)
        sent, arrived = (np.memmap(one / name, np.uint8, "r") for one in (staged.folder, folder))
        assert np.array_equal(sent, arrived)
