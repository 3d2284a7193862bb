"""Updates between real servers' stagers: as changes, from peers, and when peers die or lie."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from services.rollout import staging
from services.rollout.engine.engine import Engine
from services.rollout.weights import Updates
from services.trainer.export import export_version
from services.trainer.fanout import Fanout
from shared.quant.policy import POLICIES
from shared.weights.manifest import Manifest, delta_file, shard_file
from shared.weights.protocol import BeginUpdate, CommitUpdate, UpdateStatus
from shared.weights.shard_server import Coming, Kind, ShardServer
from tests.integration.rollout_world import JOB_ID, eventually
from tests.integration.test_weight_update_staging import StandIn
from tests.tiny_deepseek_v4 import DEMO, random_weights


@dataclass
class Peer:
    """A server without its engine: it stages, serves what it has, and may be told to lie."""

    name: str
    folder: Path
    engine: StandIn = field(default_factory=StandIn)
    spoil: Callable[[Path], Path] = lambda path: path
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        self.updates = Updates(
            cast(Engine, self.engine),
            job_id=JOB_ID,
            folder=self.folder / self.name,
            deadline_s=20.0,
            activation_limit_s=20.0,
            max_bytes=self.max_bytes,
            on_change=lambda: None,
        )
        self.shards = ShardServer(self._find)
        self.url = f"http://127.0.0.1:{self.shards.port}"

    def _find(self, version: int, kind: Kind, index: int) -> Any:
        found = self.updates.find(version, kind, index)
        return self.spoil(found) if isinstance(found, Path) else found

    async def close(self) -> None:
        await self.updates.close()
        await asyncio.to_thread(self.shards.close)


class World:
    """A trainer with versions 0, 1 (changes of 0) and 2 (changes of 1), and servers."""

    def __init__(self, folder: Path, published: dict[int, Path]) -> None:
        self.folder = folder
        self.published = published
        self.trainer = ShardServer(self._find)
        self.url = f"http://127.0.0.1:{self.trainer.port}"
        self.peers: list[Peer] = []
        self.fanout = Fanout(self.url, max_sends=1)
        self.lost: set[str] = set()  # files that the trainer has no more

    def _find(self, version: int, kind: Kind, index: int) -> Path | None:
        name = shard_file(index) if kind == "shards" else delta_file(index)
        path = self.published[version] / name
        return path if path.exists() and name not in self.lost else None

    def manifest(self, version: int) -> Manifest:
        return Manifest.model_validate_json(
            (self.published[version] / "manifest.json").read_bytes()
        )

    def add(self, number: int) -> list[Peer]:
        first = len(self.peers)
        self.peers += [Peer(f"server-{first + i}", self.folder) for i in range(number)]
        return self.peers[first:]

    def begin(self, peer: Peer, version: int, **fields: Any) -> UpdateStatus:
        manifest, served = self.manifest(version), peer.engine.policy_version
        delta = manifest.delta
        as_changes = delta is not None and delta.base_version == served
        sources = self.fanout.sources(version, peer.name, peer.url, as_changes=as_changes)
        request: dict[str, Any] = {
            "job_id": JOB_ID,
            "version": version,
            "base_version": served if as_changes else None,
            "manifest": manifest,
            "sources": sources,
        }
        known = [self.url, *(one.url for one in self.peers)]
        return peer.updates.begin(BeginUpdate(**(request | fields)), known_sources=known)

    async def staged(self, peer: Peer, version: int) -> UpdateStatus:
        async def ended() -> bool:
            return peer.updates.status(version).state != "staging"

        await eventually(ended, f"{peer.name} to stage version {version}")
        status = peer.updates.status(version)
        assert status.state == "staged", status.error
        return status

    async def update(self, version: int, *peers: Peer) -> list[UpdateStatus]:
        """All at once, each committed; what each has pulled."""
        for peer in peers:
            self.begin(peer, version)
        found = [await self.staged(peer, version) for peer in peers]
        for peer in peers:
            await peer.updates.commit(version, CommitUpdate())
            self.check_files(peer, version)
        return found

    def check_files(self, peer: Peer, version: int) -> None:
        """What a server has staged is what the trainer has published, to the byte."""
        for shard in self.manifest(version).shards:
            name = shard_file(shard.index)
            staged = peer.folder / peer.name / f"v{version:08d}" / name
            assert staged.read_bytes() == (self.published[version] / name).read_bytes()

    def sent(self, version: int, kind: Kind = "shards") -> dict[int, int]:
        """Bytes that the trainer sent of each shard."""
        found = self.trainer.sent_bytes
        return {index: n for (v, k, index), n in found.items() if (v, k) == (version, kind)}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("published")
    weights, paths = random_weights(DEMO, seed=3), {}
    for version in range(3):
        paths[version] = root / str(version)
        paths[version].mkdir()
        export_version(
            weights.items(),
            paths[version],
            job_id=JOB_ID,
            policy_version=version,
            policy=POLICIES["fp8"],
            max_shard_bytes=300_000,
            base=paths.get(version - 1),
        )
        weights = moved(weights, seed=version)
    return paths


def moved(weights: dict[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: values
        if values.dtype == torch.int64
        else values + 5e-5 * torch.randn(values.shape, generator=generator)
        for name, values in weights.items()
    }


@pytest_asyncio.fixture
async def world(tmp_path: Path, published: dict[int, Path]) -> AsyncIterator[World]:
    world = World(tmp_path, published)
    yield world
    for peer in world.peers:
        await peer.close()
    await asyncio.to_thread(world.trainer.close)
    assert await asyncio.to_thread(lambda: list(tmp_path.rglob("*.bin"))) == []


async def test_changes_are_pulled_by_a_server_that_holds_the_base(world: World) -> None:
    (peer,) = world.add(1)
    (full,) = await world.update(0, peer)
    (changes,) = await world.update(1, peer)
    (more,) = await world.update(2, peer)
    manifest = world.manifest(1)
    assert (full.pulled_bytes, full.rebuilt_shards) == (manifest.num_bytes, 0)
    assert changes.rebuilt_shards == more.rebuilt_shards == len(manifest.shards) > 3
    assert changes.pulled_bytes == manifest.delta_bytes < 0.5 * manifest.num_bytes
    assert changes.staged_bytes == changes.total_bytes == manifest.num_bytes
    spare = peer.folder / peer.name / "spare"
    inodes = {(spare / one).stat().st_ino for one in map(shard_file, range(len(manifest.shards)))}
    world.begin(peer, 0, is_rollback=True)  # whole, over what was rebuilt once
    await world.staged(peer, 0)
    world.check_files(peer, 0)
    staged = peer.folder / peer.name / "v00000000"
    assert {one.stat().st_ino for one in staged.glob("shard-*.bin")} == inodes
    assert world.sent(1) == {}


async def test_a_server_without_the_base_pulls_whole_shards(world: World) -> None:
    (peer,) = world.add(1)
    await world.update(0, peer)
    world.begin(peer, 2, base_version=1)  # the trainer is wrong about it
    status = await world.staged(peer, 2)
    assert (status.pulled_bytes, status.rebuilt_shards) == (status.total_bytes, 0)
    world.check_files(peer, 2)


async def test_a_base_or_a_change_with_other_bytes_costs_only_that_shard(
    world: World, tmp_path: Path
) -> None:
    (peer,) = world.add(1)
    await world.update(0, peer)
    victim = peer.folder / peer.name / "v00000000" / shard_file(1)
    raw = bytearray(victim.read_bytes())
    raw[1234] ^= 1
    victim.write_bytes(raw)
    (status,) = await world.update(1, peer)
    assert status.rebuilt_shards == len(world.manifest(1).shards) - 1
    assert set(world.sent(1)) == {1}


async def test_a_shard_whose_changes_nobody_has_is_pulled_whole(world: World) -> None:
    (peer,) = world.add(1)
    await world.update(0, peer)
    manifest = world.manifest(1)
    world.lost = {delta_file(0)}
    (changes,) = await world.update(1, peer)
    assert changes.rebuilt_shards == len(manifest.shards) - 1
    assert world.sent(1) == {0: manifest.shards[0].num_bytes}


async def test_each_byte_leaves_the_trainer_as_often_as_configured(world: World) -> None:
    world.fanout = Fanout(world.url, max_sends=1)
    peers = world.add(4)
    manifest = world.manifest(0)
    await world.update(0, *peers)
    assert world.sent(0) == {shard.index: shard.num_bytes for shard in manifest.shards}
    await world.update(1, *peers)
    delta = world.manifest(1).delta
    assert delta is not None
    expected = {i: one.num_bytes for i, one in enumerate(delta.shards) if one is not None}
    assert world.sent(1, "deltas") == expected
    (late,) = world.add(1)
    await world.update(1, late)  # it has no base: whole shards, from the others
    assert world.sent(1) == {}


async def test_a_server_that_takes_whole_shards_has_no_changes_on_their_way(world: World) -> None:
    """Who waited for them at that server would wait until all its shards are there."""
    whole, changed = world.add(2)
    await world.update(0, changed)
    world.begin(whole, 1)
    assert whole.updates.find(1, "deltas", 0) is None
    world.begin(changed, 1)
    assert isinstance(changed.updates.find(1, "deltas", 0), Coming)
    for peer in (whole, changed):
        await world.staged(peer, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
async def test_a_shard_without_changes_is_sent_once_to_whoever_takes_it_whole(
    world: World, order: tuple[int, ...]
) -> None:
    """One server lacks the base, two have it; the trainer may send every byte once."""
    peers = world.add(3)
    await world.update(0, *peers[1:])
    manifest = world.manifest(1)
    assert manifest.delta is not None
    last = manifest.shards[-1]
    manifest.delta.shards[last.index] = None
    for which in order:
        as_whole = {"manifest": manifest.without_delta(), "base_version": None}
        world.begin(peers[which], 1, **({"manifest": manifest} if which else as_whole))
    for peer in peers:
        await world.staged(peer, 1)
        world.check_files(peer, 1)
    assert world.sent(1)[last.index] == last.num_bytes
    assert all(n == manifest.shards[i].num_bytes for i, n in world.sent(1).items())
    deltas = manifest.delta.shards
    sent = world.sent(1, "deltas")
    assert sent == {i: one.num_bytes for i, one in enumerate(deltas) if one is not None}


async def test_two_sends_are_two_sends(world: World) -> None:
    world.fanout = Fanout(world.url, max_sends=2)
    await world.update(0, *world.add(4))
    assert world.sent(0) == {one.index: 2 * one.num_bytes for one in world.manifest(0).shards}


async def test_a_lying_peer_is_found_out_and_passed_over(world: World, tmp_path: Path) -> None:
    liar, honest, child = world.add(3)
    await world.update(0, liar, honest)
    lies = tmp_path / "lies"

    def lie(path: Path) -> Path:
        raw = bytearray(path.read_bytes())
        raw[7] ^= 16
        lies.write_bytes(raw)
        return lies

    liar.spoil = lie
    before = world.sent(0)
    world.begin(child, 0, sources=[liar.url, honest.url, world.url])
    await world.staged(child, 0)
    world.check_files(child, 0)
    assert world.sent(0) == before  # another peer had it
    lies.unlink()


async def test_a_dead_peer_is_passed_over(world: World) -> None:
    dead, child = world.add(2)
    await world.update(0, dead)
    url = dead.url
    await asyncio.to_thread(dead.shards.close)
    world.begin(child, 0, sources=[url, world.url])
    await world.staged(child, 0)
    world.check_files(child, 0)
    dead.shards = ShardServer(dead._find)


async def test_an_unknown_peer_is_no_source(world: World) -> None:
    (peer,) = world.add(1)
    for fields in ({"sources": ["http://10.0.0.1"]}, {"owners": ["http://10.0.0.1"]}):
        with pytest.raises(ValueError, match="is no registered peer"):
            world.begin(peer, 0, **fields)


async def test_parts_are_pulled_from_the_nodes_that_own_them(world: World) -> None:
    """A version of two parts: each node serves its own shards and no other."""
    (peer,) = world.add(1)
    manifest = world.manifest(0)
    shards = [one.model_copy(update={"part": one.index % 2}) for one in manifest.shards]
    split = manifest.model_copy(update={"shards": shards})

    def node(part: int) -> ShardServer:
        def find(version: int, kind: Kind, index: int) -> Path | None:
            return world._find(version, kind, index) if index % 2 == part else None

        return ShardServer(find)

    nodes = [node(0), node(1)]
    urls = [f"http://127.0.0.1:{one.port}" for one in nodes]
    request = BeginUpdate(job_id=JOB_ID, version=0, manifest=split, sources=[], owners=urls)
    peer.updates.begin(request, known_sources=urls)
    await world.staged(peer, 0)
    world.check_files(peer, 0)
    assert world.sent(0) == {}
    for part, one in enumerate(nodes):
        assert {index for _, _, index in one.sent_bytes} == {
            shard.index for shard in shards if shard.part == part
        }
        await asyncio.to_thread(one.close)


async def test_rollback_serves_an_older_version_and_only_when_asked(world: World) -> None:
    (peer,) = world.add(1)
    await world.update(0, peer)
    await world.update(1, peer)
    with pytest.raises(Exception, match="version 0 is not above active version 1"):
        world.begin(peer, 0)
    world.begin(peer, 0, is_rollback=True)
    await world.staged(peer, 0)
    assert (await peer.updates.commit(0, CommitUpdate())).version == 0
    assert peer.engine.policy_version == 0
    (status,) = await world.update(1, peer)  # and forth again, as changes
    assert status.rebuilt_shards == len(world.manifest(1).shards)


class SlowPeer:
    """Says "not yet" `times` times, getting on as long as `moves`, and then has every shard."""

    def __init__(self, world: World, *, times: int, moves: bool) -> None:
        self._world = world
        self._left = times
        self._moves = moves
        self.shards = ShardServer(self._find)
        self.url = f"http://127.0.0.1:{self.shards.port}"

    def _find(self, version: int, kind: Kind, index: int) -> Path | Coming | None:
        if self._left > 0:
            self._left -= 1
            return Coming(-self._left if self._moves else 7)
        return self._world._find(version, kind, index)


async def test_a_parent_is_waited_for_as_long_as_it_gets_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SILENCE_S", 1.0)
    (peer,) = world.add(1)
    slow = SlowPeer(world, times=240, moves=True)  # 20 ms each, three at a time
    world.peers.append(cast(Any, slow))
    began_s = time.monotonic()
    world.begin(peer, 0, sources=[slow.url, world.url])
    world.peers.remove(cast(Any, slow))
    status = await world.staged(peer, 0)
    assert time.monotonic() - began_s > 1.2
    assert status.pulled_bytes == world.manifest(0).num_bytes
    assert world.sent(0) == {}  # all of it came from the parent
    await asyncio.to_thread(slow.shards.close)


async def test_a_parent_that_stands_still_is_passed_over_and_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SILENCE_S", 0.2)
    slow = SlowPeer(world, times=10**9, moves=False)
    world.peers.append(cast(Any, slow))
    helped, alone = world.add(2)
    world.begin(helped, 0, sources=[slow.url, world.url])
    world.begin(alone, 0, sources=[slow.url])
    await world.staged(helped, 0)
    world.check_files(helped, 0)

    async def failed() -> bool:
        return alone.updates.status(0).state == "failed"

    await eventually(failed, "the parent to be given up")
    error = alone.updates.status(0).error
    assert "waited 0.2 s without progress: shards 0 of version 0 is on its way" in error
    assert "7 bytes of the version are here" in error
    assert slow.url in error
    world.peers.remove(cast(Any, slow))
    await asyncio.to_thread(slow.shards.close)


async def test_a_parent_that_gets_on_for_ever_is_waited_for_until_the_deadline(
    world: World,
) -> None:
    slow = SlowPeer(world, times=10**9, moves=True)
    world.peers.append(cast(Any, slow))
    (peer,) = world.add(1)
    peer.updates._deadline_s = 0.3
    world.begin(peer, 0, sources=[slow.url])

    async def failed() -> bool:
        return peer.updates.status(0).state == "failed"

    await eventually(failed, "the deadline to pass")
    error = peer.updates.status(0).error
    assert f"waited 0.3 s for {slow.url}/v1/weights/0/shards/" in error
    world.peers.remove(cast(Any, slow))
    await asyncio.to_thread(slow.shards.close)
