from pathlib import Path

from services.trainer.versions import VersionStore
from shared.weights.manifest import MANIFEST_FILE, Manifest, ShardEntry, TensorEntry, shard_file
from shared.weights.protocol import Probe


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
    assert store.shard(3, 0) is None
    assert store.versions() == []
    write(path, 3)
    assert store.manifest(3).policy_version == 3
    assert store.shard(3, 0).read_bytes() == b"abcd"
    assert store.shard(3, 1) is None
    assert not any(store.fresh_path(3).iterdir())


def test_versions_that_somebody_needs_are_kept(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for version in range(12):
        write(store.path(version), version)
    assert store.delete_all_but({4, 11}, keep_last=2) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert store.versions() == [4, 10, 11]
    assert store.delete_all_but({11}, keep_last=1) == [4, 10]


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
