import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.convert.flat_files import read_extent, version_extents
from services.trainer.disk import Unwritable
from services.trainer.shard_writer import ShardWriter
from services.trainer.versions import MAX_CHAIN, PUBLISHED_FILE, VersionStore
from shared.errors import WeightsCorrupt
from shared.weights.kept import VersionFolders
from shared.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardEntry,
    TensorEntry,
    delta_file,
    shard_file,
)
from shared.weights.protocol import Probe
from shared.weights.stored import StoredVersion

SIZE = 20_000


def write(path: Path, version: int, *, digit: str = "0") -> None:
    checksum = digit * 32
    shard = ShardEntry(index=0, num_bytes=4, checksum=checksum)
    tensor = TensorEntry(
        name="w", shape=[4], dtype="I8", shard=0, offset=0, num_bytes=4, checksum=checksum
    )
    manifest = Manifest(job_id="j", policy_version=version, shards=[shard], tensors=[tensor])
    path.mkdir(parents=True, exist_ok=True)
    (path / shard_file(0)).write_bytes(b"abcd")
    (path / MANIFEST_FILE).write_text(manifest.model_dump_json())


def test_unfinished_version_is_not_offered(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    path = store.fresh_path(3)
    (path / shard_file(0)).write_bytes(b"abcd")
    assert store.manifest(3) is None
    assert store.file(3, "shards", 0) is None
    assert store.versions() == []
    write(path, 3)
    assert store.manifest(3).policy_version == 3
    assert store.file(3, "shards", 0).read_bytes() == b"abcd"
    assert store.file(3, "shards", 1) is None
    assert not any(store.fresh_path(3).iterdir())


def test_versions_that_somebody_needs_are_kept(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for version in range(12):
        write(store.path(version), version)
    assert tidy(store, {4, 11}, keep_last=2) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert store.versions() == [4, 10, 11]
    assert tidy(store, {11}, keep_last=1) == [4, 10]


def tidy(
    store: VersionStore, needed: set[int], *, keep_last: int, keep_bytes: int = 2**40
) -> list[int]:
    return store.tidy(needed, keep_last=keep_last, keep_bytes=keep_bytes)


def publish(store: VersionStore, version: int) -> bytes:
    """A version of which a twentieth has changed since the one before; its bytes."""
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, SIZE, dtype=np.uint8)
    for step in range(1, version + 1):
        raw[np.random.default_rng(step).integers(0, SIZE, SIZE // 20)] += 1
    base = store.newest_whole()
    tensor = torch.from_numpy(raw).view(torch.int8)
    path = store.fresh_path(version)
    writer = ShardWriter(
        path, SIZE, base=None if base is None else StoredVersion.open(store.path(base))
    )
    with writer:
        writer.add({"w": tensor})
    manifest = Manifest(
        job_id="j",
        policy_version=version,
        shards=writer.shards,
        tensors=writer.tensors,
        delta=writer.delta(),
    )
    (path / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return raw.tobytes()


def test_any_of_the_last_fifty_can_be_had_again_to_the_byte(tmp_path: Path) -> None:
    store, contents = VersionStore(tmp_path), {}
    for version in range(60):
        contents[version] = publish(store, version)
        tidy(store, {version}, keep_last=50)
    kept = store.versions()
    assert set(range(10, 60)) <= set(kept)
    assert min(kept) >= 10 - MAX_CHAIN
    whole = [version for version in kept if store.is_whole(version)]
    assert len(whole) <= 2 + 50 / MAX_CHAIN
    assert sum(one.stored_bytes for one in store.describe()) < 0.35 * 50 * SIZE
    for version in (10, 17, 33, 58, 59):
        store.restore(version)
        assert store.is_whole(version)
        path = store.file(version, "shards", 0)
        assert path is not None
        assert path.read_bytes() == contents[version]
    again = VersionStore(tmp_path)  # as a new process finds it
    tidy(again, {59, 33}, keep_last=50)
    assert again.is_whole(33)
    assert not again.is_whole(34)
    assert again.versions() == kept


def test_an_old_version_is_rebuilt_for_a_conversion(tmp_path: Path) -> None:
    store, contents = VersionStore(tmp_path), {}
    for version in range(4):
        contents[version] = publish(store, version)
        tidy(store, {version}, keep_last=50)
    assert not store.is_whole(2)
    (extent,) = version_extents(store.path(2)).values()
    assert read_extent(extent).numpy().tobytes() == contents[2]


def test_a_copy_is_whole_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """Also once the run has deleted what the copy was made of."""
    store, contents = VersionStore(tmp_path / "run"), {}
    for version in range(5):
        contents[version] = publish(store, version)
        tidy(store, {version}, keep_last=50)
    before = files(tmp_path / "run")
    kept = VersionFolders(tmp_path / "run" / "weights")
    copies = {one: kept.copy_whole(one, tmp_path / str(one)) for one in (0, 3, 4)}
    assert files(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run")
    for version, folder in copies.items():
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        (extent,) = version_extents(folder).values()
        assert read_extent(extent).numpy().tobytes() == contents[version]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_missing_of_a_version_is_named_beside_those_that_are_whole(tmp_path: Path) -> None:
    store = kept_as_changes(tmp_path)
    (store.path(2) / delta_file(0)).unlink()
    with pytest.raises(WeightsCorrupt, match=r"00002/delta.* missing; whole versions: 0, 4"):
        store.copy_whole(3, tmp_path / "copy")
    (store.path(0) / shard_file(0)).unlink()
    with pytest.raises(WeightsCorrupt, match=r"00000/shard.* missing; whole versions: 4$"):
        store.copy_whole(1, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_oldest_go_when_all_take_too_many_bytes(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for version in range(30):
        publish(store, version)
        tidy(store, {version, 3}, keep_last=50, keep_bytes=4 * SIZE)
    sizes = {one.policy_version: one.stored_bytes for one in store.describe()}
    assert sum(sizes.values()) <= 4 * SIZE
    assert {3, 29} < set(sizes)
    assert 4 not in sizes
    store.restore(28)
    tidy(store, {29}, keep_last=50, keep_bytes=0)
    assert store.versions() == [29]


def test_a_damaged_change_is_found_when_a_version_is_restored(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for version in range(4):
        publish(store, version)
        tidy(store, {version}, keep_last=50)
    file = store.path(1) / delta_file(0)
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(WeightsCorrupt):
        store.restore(2)
    assert not store.is_whole(2)


def test_a_full_disk_is_told_by_its_place_and_speaks_against_no_version(tmp_path: Path) -> None:
    store = kept_as_changes(tmp_path)
    folder = store.path(2)
    shard, word = folder / "shard-00000.tmp", folder / "published.tmp"
    for scratch in (shard, word):
        scratch.symlink_to("/dev/full")
    full = r"cannot be written: .*No space left on device \([\d,]+ bytes are free there\)"
    with pytest.raises(Unwritable, match=f"{folder} {full}"):
        store.lend([3])
    with pytest.raises(Unwritable, match=f"{folder / PUBLISHED_FILE} {full}"):
        store.settle(2, "1" * 32)
    assert store.settled(2) is None
    shard.unlink()
    store.restore(3)
    assert store.is_whole(3)
    assert tidy(store, {4}, keep_last=1) == [0, 1, 2, 3]  # nothing stayed lent


def test_a_file_that_goes_while_sizes_are_taken_is_no_failure(tmp_path: Path) -> None:
    """Checksums and probes are written, and versions deleted, beside whoever looks."""
    store = VersionStore(tmp_path)
    for version in range(3):
        write(store.path(version), version)
    (store.path(1) / "effective.tmp").symlink_to("gone")  # is listed, and is no more
    assert [one.stored_bytes for one in store.describe()] == [store._bytes(2)] * 3
    assert store._bytes(7) == 0
    assert tidy(store, {2}, keep_last=1) == [0, 1]


def test_probe_lies_beside_its_version(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    write(store.path(0), 0)
    assert store.probe(0) is None
    probe = Probe(sequences=[], max_mean_abs_delta=0.5)
    store.keep_probe(0, probe)
    assert store.probe(0) == probe


def test_same_weights_are_told_from_others(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    write(store.path(1), 1, digit="a")
    for digit, same in (("a", True), ("b", False)):
        with store.scratch() as path:
            write(path, 1, digit=digit)
            assert store.same_weights(1, path) is same
    assert not path.exists()


def kept_as_changes(folder: Path) -> VersionStore:
    store = VersionStore(folder)
    for version in range(5):
        publish(store, version)
        tidy(store, {version}, keep_last=50)
    assert not any(store.is_whole(version) for version in (1, 2, 3))
    return store


@pytest.mark.parametrize("gone", [1, 3])
def test_a_change_that_is_missing_is_named_before_anything_is_rebuilt(
    tmp_path: Path, gone: int
) -> None:
    store = kept_as_changes(tmp_path)
    (store.path(gone) / delta_file(0)).unlink()
    for ask in (store.check, store.restore):
        with pytest.raises(
            WeightsCorrupt, match=rf"version 3 .*v0000000{gone}/delta-00000.bin is m"
        ):
            ask(3)
    assert not list(store.path(2).glob("shard-*"))
    store.check(0)
    store.check(4)
    tidy(store, {4, 0}, keep_last=50)  # and nobody else minds


def test_a_change_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = kept_as_changes(tmp_path)
    file = store.path(2) / delta_file(0)
    file.unlink()
    file.mkdir()
    with pytest.raises(WeightsCorrupt, match=r"version 2 cannot be rebuilt: .*delta-00000.bin"):
        store.restore(3)


def test_a_manifest_that_is_unreadable_costs_what_is_built_on_it_and_no_more(
    tmp_path: Path,
) -> None:
    store = kept_as_changes(tmp_path)
    (store.path(2) / MANIFEST_FILE).write_text("{")
    store = VersionStore(tmp_path)  # as a new process finds it
    assert store.manifest(2) is None
    with pytest.raises(WeightsCorrupt, match=r"version 3 cannot be had: .*v00000002/manifest.json"):
        store.check(3)
    store.check(1)
    tidy(store, {4, 0}, keep_last=50)
    assert [one.policy_version for one in store.describe()] == [0, 1, 2, 3, 4]


def test_a_version_whose_base_was_deleted_does_not_stop_the_others(tmp_path: Path) -> None:
    store = kept_as_changes(tmp_path)
    (store.path(0) / MANIFEST_FILE).unlink()
    with pytest.raises(WeightsCorrupt, match=r"^version 0 is gone; whole versions: "):
        store.check(0)
    with pytest.raises(WeightsCorrupt, match="version 2 is built on version 0, which is gone"):
        store.restore(2)
    publish(store, 5)
    assert tidy(store, {5}, keep_last=2) == [1, 2, 3]
    store.check(5)


def test_a_version_kept_as_changes_is_lent_whole_until_it_is_taken_back(tmp_path: Path) -> None:
    store, contents = VersionStore(tmp_path), {}
    for version in range(6):
        contents[version] = publish(store, version)
        tidy(store, {version}, keep_last=50)
    assert not store.is_whole(3)
    assert store.can_be_had(3)
    folders = store.lend([3, 2])
    tidy(store, {5}, keep_last=1)
    for version in (2, 3):
        assert (folders[version] / shard_file(0)).read_bytes() == contents[version]
    store.take_back([3, 2])
    tidy(store, {5}, keep_last=1)
    assert not store.is_whole(3)


def test_a_version_that_is_gone_is_not_lent(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    write(store.path(1), 1)
    assert not store.can_be_had(0)
    with pytest.raises(WeightsCorrupt, match="version 0"):
        store.lend([0, 1])
    write(store.path(2), 2)
    assert tidy(store, {2}, keep_last=1) == [1]  # nothing stayed lent
