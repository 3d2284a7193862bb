"""One version from several owners: each rank lists its own shards, and the lists become one.

A tensor has one owner, so parts never overlap, and shards are numbered through: first all of part
0, then all of part 1. Merging is a pure function: every rank does it alike and no rank sees another
one's tensors.
"""

from collections.abc import Sequence

from shared.weights.manifest import Delta, DeltaShard, Manifest, ShardEntry


def merge_parts(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of the whole version; part i is that of rank i.

    ValueError if two parts have a tensor of one name, or are of different versions or bases.
    """
    first = parts[0]
    owners: dict[str, int] = {}
    for number, part in enumerate(parts):
        if (part.job_id, part.policy_version) != (first.job_id, first.policy_version):
            raise ValueError(
                f"part {number} is of {part.job_id} version {part.policy_version}, part 0 of "
                f"{first.job_id} version {first.policy_version}"
            )
        for tensor in part.tensors:
            if (owner := owners.setdefault(tensor.name, number)) != number:
                raise ValueError(f"{tensor.name} is in part {owner} and in part {number}")
    firsts = first_shards(parts)
    shards = [
        ShardEntry(
            index=start + shard.index,
            num_bytes=shard.num_bytes,
            checksum=shard.checksum,
            part=number,
        )
        for number, (start, part) in enumerate(zip(firsts, parts, strict=True))
        for shard in part.shards
    ]
    tensors = [
        tensor.model_copy(update={"shard": start + tensor.shard})
        for start, part in zip(firsts, parts, strict=True)
        for tensor in part.tensors
    ]
    return Manifest(
        job_id=first.job_id,
        policy_version=first.policy_version,
        shards=shards,
        tensors=tensors,
        delta=_merge_deltas(parts),
    )


def first_shards(parts: Sequence[Manifest]) -> list[int]:
    """The number in the whole version of each part's first shard."""
    counts = [len(part.shards) for part in parts]
    return [sum(counts[:number]) for number in range(len(counts))]


def _merge_deltas(parts: Sequence[Manifest]) -> Delta | None:
    bases = {part.delta.base_version for part in parts if part.delta is not None}
    if not bases:
        return None
    if len(bases) > 1:
        raise ValueError(f"parts are changes of different versions: {sorted(bases)}")
    shards: list[DeltaShard | None] = []
    for part in parts:
        shards += part.delta.shards if part.delta is not None else [None] * len(part.shards)
    return Delta(base_version=bases.pop(), shards=shards)
