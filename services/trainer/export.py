"""The actor's weights as one published version: release names, release formats, checksummed shards.

Every rank exports the tensors that it owns, quantised once, with the code that loaders and
converters use; their lists are merged, and no rank sees another one's bytes:

    own tensors ──> shards of this part ──> lists exchanged, merged ──> shards get their numbers
                                                                        └──> manifest, last

A version without a manifest is unfinished. With a base, what changed since is written as well.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from torch import Tensor

from services.trainer.disk import Unwritable
from services.trainer.ownership import fused_groups
from services.trainer.shard_writer import ShardWriter, write_file
from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.checkpoint import quantise_tensor
from shared.quant.policy import Policy
from shared.weights.manifest import MANIFEST_FILE, Manifest, delta_file, shard_file
from shared.weights.parts import first_shards, merge_parts
from shared.weights.stored import StoredVersion


@dataclass(frozen=True, slots=True)
class Exchange:
    """The ranks that export together: `gather` gives every rank's bytes to all, in rank order."""

    rank: int
    gather: Callable[[bytes], list[bytes]]


ALONE = Exchange(0, lambda mine: [mine])


def export_version(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    job_id: str,
    policy_version: int,
    policy: Policy,
    max_shard_bytes: int,
    base: Path | None = None,
    exchange: Exchange = ALONE,
) -> Manifest:
    """Write this rank's tensors (release name, values) into `directory`; the whole manifest.

    Collective: all ranks of `exchange` call it, each with whole tensors that no other rank has (see
    `ownership.whole_tensors`). `directory` exists and is empty; of one host's ranks it is the same.
    A shard holds whole tensors and at most `max_shard_bytes`, unless one tensor is larger. `base`
    is the directory of an earlier version, against which a delta is made. WeightsCorrupt names the
    rank and tensor that cannot be published, `Unwritable` a disk that has no room; all ranks raise
    it.
    """
    version = Manifest(job_id=job_id, policy_version=policy_version, shards=[], tensors=[])
    writer = ShardWriter(
        directory,
        max_shard_bytes,
        prefix=f"part-{exchange.rank:05d}-",
        base=None if base is None else StoredVersion.open(base),
    )
    mine, wrong, unwritten = None, "", ""
    own = iter(tensors)
    try:
        mine = _export_own(own, writer, policy, version)
    except ValueError as err:
        wrong = str(err)
    except OSError as err:
        unwritten = str(err)
    for _ in own:
        pass  # a rank that has failed still owes the others its slices of what they own
    parts = _exchanged(exchange, directory, _Part(manifest=mine, wrong=wrong, unwritten=unwritten))
    manifest = merge_parts(parts)
    _place(directory, writer.prefix, parts[exchange.rank], first_shards(parts)[exchange.rank])
    exchange.gather(b"placed")
    path = directory / MANIFEST_FILE
    body = manifest.model_dump_json().encode()
    write_file(path.with_suffix(f".{exchange.rank}.tmp"), path, [body])
    return manifest


def _export_own(
    tensors: Iterable[tuple[str, Tensor]], writer: ShardWriter, policy: Policy, version: Manifest
) -> Manifest:
    with writer:
        for together in fused_groups(tensors):
            stored: dict[str, Tensor] = {}
            for name, weight in together:
                stored |= quantise_tensor(name, weight.detach(), policy=policy)
            writer.add(stored)
    found = {"shards": writer.shards, "tensors": writer.tensors, "delta": writer.delta()}
    return version.model_copy(update=found)


class _Part(BaseModel):
    """What a rank has written, or why not."""

    manifest: Manifest | None
    wrong: str = ""
    unwritten: str = ""


def _exchanged(exchange: Exchange, directory: Path, mine: _Part) -> list[Manifest]:
    """All parts; an error of any rank is raised by every rank."""
    bodies = exchange.gather(mine.model_dump_json().encode())
    manifests: list[Manifest] = []
    for rank, part in enumerate(map(_Part.model_validate_json, bodies)):
        where = f"rank {rank}: " if len(bodies) > 1 else ""
        if part.wrong:
            raise WeightsCorrupt(f"{where}{part.wrong}")
        if part.manifest is None:
            raise Unwritable.at(directory, f"{where}{part.unwritten}")
        manifests.append(part.manifest)
    return manifests


def _place(directory: Path, prefix: str, part: Manifest, first: int) -> None:
    """Give this part's files the numbers that they have in the whole version."""
    for index in range(len(part.shards)):
        for name in (shard_file, delta_file):
            own = directory / f"{prefix}{name(index)}"
            if own.exists():
                own.rename(directory / name(first + index))
