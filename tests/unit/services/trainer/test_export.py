"""One version from one source or from several, whole or as changes: always the same bytes."""

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer import shard_writer
from services.trainer.disk import Unwritable
from services.trainer.export import Exchange, export_version
from services.trainer.ownership import Named, Piece, whole_tensors
from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.names import fused_partner
from shared.quant.policy import POLICIES
from shared.weights.manifest import MANIFEST_FILE, Manifest, delta_file, shard_file
from shared.weights.stored import StoredVersion, rebuild_shard
from tests.tiny_deepseek_v4 import DEMO, random_weights

SPLIT_AXES = {  # as tensor parallelism splits them
    "attn.wq_b.weight": 0,
    "attn.wo_a.weight": 0,
    "attn.wo_b.weight": 1,
    "attn.attn_sink": 0,
    "ffn.shared_experts.w1.weight": 0,
    "ffn.shared_experts.w3.weight": 0,
    "ffn.shared_experts.w2.weight": 1,
    "embed.weight": 0,
}


def axis_of(name: str) -> int | None:
    return next((axis for end, axis in SPLIT_AXES.items() if name.endswith(end)), None)


@dataclass
class Team:
    """Ranks as threads that meet."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20.0)
        self.slots = [None] * self.size

    def meet(self, rank: int, mine: object) -> list[object]:
        self.slots[rank] = mine
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def run(self, work: Callable[[int], object]) -> list[object]:
        """Each rank's result or error."""
        results: list[object] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except (WeightsCorrupt, Unwritable) as err:
                results[rank] = err

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        return results


@dataclass
class Group:
    team: Team
    rank: int

    @property
    def size(self) -> int:
        return self.team.size

    def collect(self, values: Tensor, *, axis: int, owner: int) -> Tensor | None:
        pieces = self.team.meet(self.rank, values)
        return torch.cat(pieces, dim=axis) if self.rank == owner else None  # type: ignore[arg-type]


def pieces_of(weights: dict[str, Tensor], rank: int, size: int) -> Iterator[Piece]:
    for name, values in weights.items():
        axis = axis_of(name)
        yield Piece(name, values if axis is None else values.chunk(size, axis)[rank], axis)


def export(
    weights: dict[str, Tensor] | Iterator[Named], folder: Path, version: int = 1, **more: object
) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    return export_version(
        weights.items() if isinstance(weights, dict) else weights,
        folder,
        job_id="test",
        policy_version=version,
        policy=POLICIES["fp8"],
        max_shard_bytes=200_000,
        **more,  # type: ignore[arg-type]
    )


def contents(folder: Path) -> dict[str, bytes]:
    stored = StoredVersion.open(folder)
    assert stored is not None
    found = {entry.name: stored.tensor(entry.name) for entry in stored.manifest.tensors}
    return {name: one[1].tobytes() for name, one in found.items() if one is not None}


def moved_slightly(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: values if values.dtype == torch.int64 or "norm" in name
        else values + 2e-4 * torch.randn(values.shape, generator=generator)
        for name, values in weights.items()
    }  # fmt: skip


def rebuilt(base: Path, folder: Path) -> int:
    """Shards that come as changes; each gives the published bytes."""
    before, after = StoredVersion.open(base), StoredVersion.open(folder)
    assert before is not None
    assert after is not None
    assert after.manifest.delta is not None
    changed = [index for index, one in enumerate(after.manifest.delta.shards) if one is not None]
    for index in changed:
        changes = np.fromfile(folder / delta_file(index), np.uint8)
        result = rebuild_shard(before, after.manifest, index, changes)
        assert result.tobytes() == (folder / shard_file(index)).read_bytes()
    return len(changed)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(DEMO, seed=1)


def export_parts(parts: list[dict[str, Tensor]], folder: Path, **more: object) -> list[object]:
    """Each rank publishes its own tensors; the manifest that each of them has then."""
    team = Team(len(parts))

    def rank(number: int) -> Manifest:
        exchange = Exchange(number, lambda mine: team.meet(number, mine))  # type: ignore[arg-type,return-value]
        return export(parts[number], folder, exchange=exchange, **more)

    return team.run(rank)


@dataclass
class TwoRanks:
    """Publish what two ranks hold slices of; `owned` are the names that each of them wrote."""

    owned: list[list[str]] = field(default_factory=lambda: [[], []])

    def export(self, weights: dict[str, Tensor], folder: Path, **more: object) -> list[object]:
        team = Team(2)
        folder.mkdir()

        def rank(number: int) -> Manifest:
            exchange = Exchange(number, lambda mine: team.meet(number, mine))  # type: ignore[arg-type,return-value]
            return export(self._own(weights, number, team), folder, exchange=exchange, **more)

        return team.run(rank)

    def _own(self, weights: dict[str, Tensor], rank: int, team: Team) -> Iterator[Named]:
        for named in whole_tensors(pieces_of(weights, rank, 2), Group(team, rank)):
            self.owned[rank].append(named[0])
            yield named


def test_two_sources_of_split_tensors_publish_the_bytes_of_one(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    export(weights, tmp_path / "one")
    ranks, folder = TwoRanks(), tmp_path / "two"
    first, second = ranks.export(weights, folder)
    assert isinstance(first, Manifest)
    assert first == second == Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    assert {shard.part for shard in first.shards} == {0, 1}
    assert contents(folder) == contents(tmp_path / "one")
    assert set(ranks.owned[0]).isdisjoint(ranks.owned[1])
    for names in ranks.owned:
        assert len(names) > len(weights) / 3
        assert all(fused_partner(name) in {None, *names} for name in names)
    files = {path.name for path in folder.iterdir()}
    assert files == {MANIFEST_FILE, *(shard_file(one.index) for one in first.shards)}


def test_changes_of_two_sources_rebuild_the_bytes_of_one(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """Two versions in a row; each part's changes are numbered as its shards are."""
    ranks, moved = TwoRanks(), moved_slightly(weights)
    ranks.export(weights, tmp_path / "1")
    second, _ = ranks.export(moved, tmp_path / "2", version=2, base=tmp_path / "1")
    assert isinstance(second, Manifest)
    assert second.delta is not None
    assert second.delta.base_version == 1
    assert {one.part for one in second.shards if second.delta.shards[one.index]} == {0, 1}
    assert rebuilt(tmp_path / "1", tmp_path / "2") == len(second.shards)
    export(moved, tmp_path / "one", version=2)
    assert contents(tmp_path / "2") == contents(tmp_path / "one")


def test_a_part_without_changes_leaves_those_of_the_others_their_places(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """Rank 0 has nothing smaller than its shards, so its part has no changes at all."""
    names = [name for name in sorted(weights) if ".experts." in name]
    kept, new = names[::2], names[1::2]
    other = random_weights(DEMO, seed=2)
    versions = {
        1: [{name: weights[name] for name in new}, {name: weights[name] for name in kept}],
        2: [{name: other[name] for name in new}, {name: weights[name] for name in kept}],
    }
    for version, parts in versions.items():
        folder, base = tmp_path / str(version), tmp_path / str(version - 1)
        manifest, _ = export_parts(parts, folder, version=version, base=base)
    assert isinstance(manifest, Manifest)
    assert manifest.delta is not None
    has_changes = [one is not None for one in manifest.delta.shards]
    assert has_changes == [one.part == 1 for one in manifest.shards]
    assert rebuilt(tmp_path / "1", tmp_path / "2") == sum(has_changes) > 0


def test_an_error_of_one_rank_is_raised_by_all_with_the_tensor_and_the_rank(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    team = Team(2)
    bad = {"layers.1.attn.wq_a.weight": torch.full((128, 128), torch.nan)}

    def rank(number: int) -> Manifest:
        exchange = Exchange(number, lambda mine: team.meet(number, mine))  # type: ignore[arg-type,return-value]
        mine = bad if number else {"norm.weight": weights["norm.weight"]}
        return export(mine, tmp_path, exchange=exchange)

    for error in team.run(rank):
        assert isinstance(error, WeightsCorrupt)
        assert "rank 1: layers.1.attn.wq_a.weight: NaN or infinity" in str(error)
    assert not (tmp_path / MANIFEST_FILE).exists()


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b.weight", "layers.1.attn.wo_b.weight"])
def test_an_error_between_ranks_that_share_tensors_leaves_none_of_them_waiting(
    name: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """Slices of what comes after the bad tensor are still to be joined at the other rank."""
    bad = weights | {name: torch.full_like(weights[name], torch.nan)}
    for error in TwoRanks().export(bad, tmp_path / "out"):
        assert isinstance(error, WeightsCorrupt)
        assert f": {name}: NaN or infinity" in str(error)
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()


def test_a_disk_without_room_for_one_part_is_told_by_all(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team(2)
    write_file = shard_writer.write_file

    def full(temporary: Path, *rest: Any) -> None:
        if "part-00001" in temporary.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(temporary, *rest)

    monkeypatch.setattr(shard_writer, "write_file", full)

    def rank(number: int) -> Manifest:
        exchange = Exchange(number, lambda mine: team.meet(number, mine))  # type: ignore[arg-type,return-value]
        mine = [key for index, key in enumerate(weights) if index % 2 == number]
        return export({key: weights[key] for key in mine}, tmp_path, exchange=exchange)

    for error in team.run(rank):
        assert isinstance(error, Unwritable)
        assert f"{tmp_path} cannot be written: rank 1: [Errno 28]" in str(error)
    assert not (tmp_path / MANIFEST_FILE).exists()


def test_parts_that_both_have_a_tensor_are_refused(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    both = Exchange(0, lambda mine: [mine, mine])
    with pytest.raises(ValueError, match=r"norm\.weight is in part 0 and in part 1"):
        export({"norm.weight": weights["norm.weight"]}, tmp_path, exchange=both)


def test_fused_pairs_share_a_shard(weights: dict[str, Tensor], tmp_path: Path) -> None:
    manifest = export(weights, tmp_path)
    shard_of = {entry.name: entry.shard for entry in manifest.tensors}
    pairs = [(name, fused_partner(name)) for name in shard_of]
    assert sum(partner is not None for _, partner in pairs) > 20
    for name, partner in pairs:
        assert partner is None or shard_of[name] == shard_of[partner]


def test_changes_since_a_base_rebuild_the_version_to_the_byte(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    export(weights, tmp_path / "0", version=0)
    moved = moved_slightly(weights)
    manifest = export(moved, tmp_path / "1", base=tmp_path / "0")
    assert manifest.delta is not None
    assert manifest.delta.base_version == 0
    assert 0 < manifest.delta_bytes < 0.5 * manifest.num_bytes
    assert rebuilt(tmp_path / "0", tmp_path / "1") == len(manifest.shards)
    wrong = StoredVersion.open(tmp_path / "1")
    assert wrong is not None
    with pytest.raises(WeightsCorrupt, match="checksum differs"):
        rebuild_shard(wrong, manifest, 0, np.fromfile(tmp_path / "1" / delta_file(0), np.uint8))


def test_no_changes_are_written_where_they_are_as_large_as_the_weights(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    export(weights, tmp_path / "0", version=0)
    manifest = export(random_weights(DEMO, seed=2), tmp_path / "1", base=tmp_path / "0")
    assert manifest.delta is None or manifest.delta_bytes < manifest.num_bytes
    missing = export(weights, tmp_path / "2", base=tmp_path / "nowhere")
    assert missing.delta is None
    assert missing.delta_bytes == missing.num_bytes


def test_equal_weights_cost_nothing_as_changes(weights: dict[str, Tensor], tmp_path: Path) -> None:
    export(weights, tmp_path / "0", version=0)
    manifest = export(weights, tmp_path / "1", base=tmp_path / "0")
    assert (manifest.delta is not None, manifest.delta_bytes) == (True, 0)
