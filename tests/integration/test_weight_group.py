"""Shards through a process group of its own (gloo): the bytes arrive, and who hangs is named."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from services.rollout.engine.engine import Engine
from services.rollout.engine.weights import receive_version
from services.trainer import rounds as module
from services.trainer.rounds import Rounds
from shared.errors import ConfigInvalid, DeadlineExceeded, RemoteError, TandemError, WeightsCorrupt
from shared.process import free_port
from shared.tasks import end
from shared.weights.group import check_bytes, check_settings, receive_shards, send_shards
from shared.weights.manifest import Manifest, ShardEntry, shard_file
from shared.weights.protocol import GroupTransfer, UpdateStatus
from tests.integration.test_weight_forwarding import World, published, world
from tests.integration.test_weight_update_staging import StandIn

__all__ = ["published", "world"]  # fixtures

NAMES = ["owner-0", "owner-1", "rollout-0", "rollout-1"]


def transfer(port: int, rank: int, **fields: object) -> GroupTransfer:
    values = {
        "name": "v1",
        "backend": "gloo",
        "host": "127.0.0.1",
        "port": port,
        "rank": rank,
        "members": NAMES,
        "deadline_s": 15.0,
    }
    return GroupTransfer.model_validate(values | fields)


def version() -> tuple[Manifest, list[np.ndarray]]:
    """Four shards of two owners."""
    sizes = (100_000, 1, 70_000, 300_000)
    bodies = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    shards = [
        ShardEntry(
            index=i, num_bytes=len(raw), checksum=xxhash.xxh3_128_hexdigest(raw.data), part=i // 2
        )
        for i, raw in enumerate(bodies)
    ]
    return Manifest(job_id="j", policy_version=1, shards=shards, tensors=[]), bodies


def together(*members: Callable[[], None]) -> list[TandemError | None]:
    """Each in a thread; what it raised."""
    errors: list[TandemError | None] = [None] * len(members)

    def run(number: int) -> None:
        try:
            members[number]()
        except TandemError as err:
            errors[number] = err

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
        assert not thread.is_alive()
    return errors


def sender(port: int, rank: int, **fields: object) -> Callable[[], None]:
    manifest, bodies = version()

    def read(shard: ShardEntry) -> Tensor:
        assert shard.part == rank  # nobody reads what another one owns
        return torch.from_numpy(bodies[shard.index])

    return lambda: send_shards(transfer(port, rank, **fields), manifest, read)


def receiver(port: int, rank: int, into: dict[int, bytes], **fields: object) -> Callable[[], None]:
    manifest, _ = version()

    def write(shard: ShardEntry, data: Tensor) -> None:
        raw = data.numpy()
        check_bytes(shard, xxhash.xxh3_128_hexdigest(raw.data))
        into[shard.index] = raw.tobytes()

    return lambda: receive_shards(transfer(port, rank, **fields), manifest, write)


def test_every_server_gets_the_shards_of_every_owner() -> None:
    port, found = free_port(), ({}, {})
    errors = together(
        sender(port, 0), sender(port, 1), receiver(port, 2, found[0]), receiver(port, 3, found[1])
    )
    assert errors == [None] * 4
    _, bodies = version()
    for one in found:
        assert one == {i: raw.tobytes() for i, raw in enumerate(bodies)}


def test_a_member_that_does_not_come_is_named_within_the_deadline() -> None:
    port, began_s = free_port(), time.monotonic()
    given = {"deadline_s": 1.5}
    errors = together(
        sender(port, 0, **given), sender(port, 1, **given), receiver(port, 2, {}, **given)
    )
    assert time.monotonic() - began_s < 60
    for error in errors:
        assert isinstance(error, DeadlineExceeded)
    assert "rollout-1 to join" in str(errors[0])


def test_a_member_that_hangs_in_the_middle_is_named() -> None:
    """It has joined and taken a shard; then it does nothing any more."""
    port, given, awake = free_port(), {"deadline_s": 4.0}, threading.Event()

    def stop(shard: ShardEntry, data: Tensor) -> None:
        awake.wait(30.0)

    manifest, _ = version()

    def hanging() -> None:
        receive_shards(transfer(port, 3, **given), manifest, stop)

    thread = threading.Thread(target=lambda: together(hanging), daemon=True)
    thread.start()
    errors = together(
        sender(port, 0, **given), sender(port, 1, **given), receiver(port, 2, {}, **given)
    )
    awake.set()
    told = [str(error) for error in errors if error is not None]
    assert told
    assert any("rollout-1" in text for text in told), told
    assert all(text.endswith(")") for text in told), told  # with the transport's own reason
    assert not any("rollout-0" in text for text in told), told
    thread.join(20.0)


def test_other_bytes_than_the_manifest_says_are_refused() -> None:
    manifest, _ = version()
    with pytest.raises(WeightsCorrupt, match="shard 2 from the process group"):
        check_bytes(manifest.shards[2], "0" * 32)


def test_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigInvalid, match="needs a GPU"):
        check_settings(transfer(1, 0, backend="nccl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigInvalid, match="needs NCCL_SOCKET_IFNAME"):
        check_settings(transfer(1, 0, backend="nccl", host="10.1.2.3"))
    check_settings(transfer(1, 0, backend="nccl"))


class GroupEngine(StandIn):
    """Takes what a group brings, as an engine child does."""

    async def receive(self, folder: Path, group: GroupTransfer) -> None:
        try:
            await asyncio.to_thread(receive_version, folder, group)
        except TandemError as err:  # as it comes out of a child
            raise RemoteError(type(err).__name__, str(err)) from err


async def staged_by_group(world: World, rounds: Rounds) -> list[UpdateStatus]:
    """Two servers that need version 0 at the same time."""
    peers = world.add(2)
    for peer in peers:
        peer.engine = GroupEngine()
        peer.updates._engine = cast(Engine, peer.engine)
    names = [peer.name for peer in peers]
    groups = await asyncio.gather(*(rounds.join(0, name, num_owners=1) for name in names))
    assert [one.members for one in groups] == [["rank 0", *names]] * 2
    for peer, group in zip(peers, groups, strict=True):
        world.begin(peer, 0, group=group)
    return [await world.staged(peer, 0) for peer in peers]


async def test_servers_that_need_a_version_together_take_it_from_the_ranks(world: World) -> None:
    manifest, sent = world.manifest(0), []

    def broadcast(owner: GroupTransfer) -> None:
        def read(shard: ShardEntry) -> Tensor:
            sent.append(shard.index)
            path = world.published[0] / shard_file(shard.index)
            return torch.from_numpy(np.fromfile(path, np.uint8))

        send_shards(owner, manifest, read)

    async def send(version: int, owners: Sequence[GroupTransfer]) -> str:
        await asyncio.to_thread(broadcast, owners[0])
        return ""

    rounds = Rounds(send, backend="gloo", host="127.0.0.1", deadline_s=15.0)
    found = await staged_by_group(world, rounds)
    assert [one.pulled_bytes for one in found] == [0, 0]
    assert sent == [shard.index for shard in manifest.shards]  # once, for all servers
    assert world.sent(0) == {}
    for peer in world.peers:
        world.check_files(peer, 0)
    await rounds.close()


async def test_ranks_that_do_not_come_cost_the_deadline_and_the_shards_are_pulled(
    world: World,
) -> None:
    async def send(version: int, owners: Sequence[GroupTransfer]) -> str:
        return "rank 0 has other things to do"

    rounds = Rounds(send, backend="gloo", host="127.0.0.1", deadline_s=1.0)
    began_s = time.monotonic()
    found = await staged_by_group(world, rounds)
    assert time.monotonic() - began_s < 60
    total = world.manifest(0).num_bytes
    assert [one.pulled_bytes for one in found] == [total, total]
    await rounds.close()


async def test_a_server_that_goes_while_a_round_gathers_does_not_keep_the_others() -> None:
    sent: list[Sequence[GroupTransfer]] = []

    async def send(version: int, owners: Sequence[GroupTransfer]) -> str:
        sent.append(owners)
        return ""

    rounds = Rounds(send, backend="gloo", host="127.0.0.1", deadline_s=1.0)
    joining = [asyncio.create_task(rounds.join(7, name, num_owners=1)) for name in ("a", "b")]
    await asyncio.sleep(0)
    await end(joining[0])
    async with asyncio.timeout(60):
        found = await joining[1]
        later = await rounds.join(7, "c", num_owners=1)
    assert (found.members, found.rank) == (["rank 0", "a", "b"], 2)
    assert later.members == ["rank 0", "c"]
    await rounds.close()
    assert [len(owners) for owners in sent] == [1, 1]


async def test_a_round_that_finds_no_port_is_over_and_servers_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left() -> int:
        raise OSError(98, "no port is free")

    async def send(version: int, owners: Sequence[GroupTransfer]) -> str:
        raise AssertionError("there is no group")

    rounds = Rounds(send, backend="gloo", host="127.0.0.1", deadline_s=1.0)
    monkeypatch.setattr(module, "free_port", none_left)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(rounds.join(7, name, num_owners=1) for name in "ab"))
        assert found == [None, None]
        monkeypatch.setattr(module, "free_port", free_port)
        monkeypatch.setattr(rounds, "_send", sent_to_nobody)
        later = await rounds.join(7, "a", num_owners=1)  # nothing of the first one is left
    assert later is not None
    assert later.members == ["rank 0", "a"]
    await rounds.close()


async def sent_to_nobody(version: int, owners: Sequence[GroupTransfer]) -> str:
    raise WeightsCorrupt("the ranks lack a shard")  # costs the round, not the job


async def test_servers_do_not_wait_for_a_round_that_is_closed() -> None:
    rounds = Rounds(sent_to_nobody, backend="gloo", host="127.0.0.1", deadline_s=1.0)
    joining = asyncio.create_task(rounds.join(7, "a", num_owners=1))
    await asyncio.sleep(0)
    await rounds.close()
    assert await asyncio.wait_for(joining, 60) is None
