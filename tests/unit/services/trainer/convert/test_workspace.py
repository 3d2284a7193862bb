from pathlib import Path

import pytest

from services.trainer.convert.targets import HashedFile, Shard
from services.trainer.convert.workspace import Record, Workspace, check_target, workspace
from shared.errors import ConfigInvalid

SHARDS = [Shard(f"{i}.bin", (), 5) for i in range(3)]


def finish_shard(space: Workspace, name: str) -> None:
    with HashedFile(space.result / name, "xxh3-128") as file:
        file.write(b"12345")
        space.keep(Record(name, 5, "xxh3-128", file.sync(), [["row"]]))


def test_finished_shards_are_kept_and_others_removed(tmp_path: Path) -> None:
    with workspace(tmp_path / "target") as space:
        assert space.prepare({"a": 1})
        finish_shard(space, "0.bin")
        finish_shard(space, "1.bin")
        (space.result / "2.bin").write_bytes(b"123")
    with workspace(tmp_path / "target") as space:
        assert space.prepare({"a": 1})
        kept = space.kept(SHARDS)
        assert sorted(kept) == ["0.bin", "1.bin"]
        assert kept["0.bin"].rows == [["row"]]
        assert not (space.result / "2.bin").exists()


@pytest.mark.parametrize("damage", [b"12345678", b"1234", b"12346"])
def test_a_shard_that_is_not_what_was_written_is_not_kept(tmp_path: Path, damage: bytes) -> None:
    with workspace(tmp_path / "target") as space:
        space.prepare({})
        finish_shard(space, "0.bin")
        (space.result / "0.bin").write_bytes(damage)
        assert not space.kept(SHARDS)


def test_another_plan_starts_over(tmp_path: Path) -> None:
    with workspace(tmp_path / "target") as space:
        space.prepare({"a": 1})
        finish_shard(space, "0.bin")
        assert not space.prepare({"a": 2})
        assert not space.kept(SHARDS)


def test_all_files_and_the_folder_are_on_the_disk_before_the_target_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, synced = tmp_path / "target", list[str]()

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert not target.exists() or synced[-1] in (tmp_path.name, ".target.converting")

    with workspace(target) as space:
        space.prepare({})
        finish_shard(space, "0.bin")
        (space.result / "config.json").write_text("{}")
        monkeypatch.setattr("os.fsync", fsync)
        space.finish()
    assert synced[:3] == ["0.bin", "config.json", "result"]
    assert synced[-1] == tmp_path.name


def test_the_target_appears_at_the_end_and_replaces_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with workspace(target) as space:
        space.prepare({})
        finish_shard(space, "0.bin")
        assert [path.name for path in target.iterdir()] == ["old"]
        space.finish()
    assert [path.name for path in target.iterdir()] == ["0.bin"]
    assert list(tmp_path.iterdir()) == [target]


def test_two_processes_do_not_make_one_target(tmp_path: Path) -> None:
    with (
        workspace(tmp_path / "target"),
        pytest.raises(ConfigInvalid, match="is being made by another process"),
        workspace(tmp_path / "target"),
    ):
        pass


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with workspace(tmp_path / "target") as space:
        space.check_space(1)
        with pytest.raises(ConfigInvalid, match=r"GB must be free for the result, .* are: free"):
            space.check_space(10**18)


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    check_target(tmp_path / "new", overwrite=False)
    with pytest.raises(ConfigInvalid, match="exists: remove it, or replace it with --overwrite"):
        check_target(tmp_path, overwrite=False)
    with pytest.raises(ConfigInvalid, match="is no checkpoint, so it is not overwritten"):
        check_target(tmp_path, overwrite=True)
    (tmp_path / "config.json").touch()
    check_target(tmp_path, overwrite=True)
