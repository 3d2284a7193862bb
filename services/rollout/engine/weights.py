"""A policy version in the engine child: read from staged shards, derived, proven, then served.

A candidate is built beside what is served and never touches it. Only when its tensors are the
architecture's, its derived state gives back what was published, and it scores the probe like the
trainer, does the engine switch to it; until then a failure costs nothing but the candidate.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from services.rollout.engine.probing import Proven
from services.rollout.models.deepseek_v4_weights import Derived, derive, effective, published
from shared.errors import OtherValues, WeightsCorrupt
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import check_stored
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.weights.dtypes import TORCH_DTYPES
from shared.weights.effective import effective_checksum, value_digest
from shared.weights.group import check_bytes, receive_shards
from shared.weights.manifest import INCOMING_FILE, Manifest, ShardEntry, shard_file
from shared.weights.protocol import GroupTransfer

Derive = Callable[[Architecture, Mapping[str, Tensor]], Derived]


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """Everything derived from the canonical tensors, which are kept until that is proven."""

    policy_version: int
    canonical: dict[str, Tensor]
    derived: Derived
    digests: Mapping[str, str]  # of the effective values, by name

    @property
    def checksum(self) -> str:
        """Of all effective values."""
        return effective_checksum(self.digests)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proven version that is not served yet, and what building it took."""

    version: LoadedVersion
    seconds: dict[str, float]
    proven: Proven | None  # its probe


def read_canonical(manifest: Manifest, folder: Path) -> dict[str, Tensor]:
    """The shards in `folder` as tensors by release name; WeightsCorrupt names one that is not so.

    Also what was verified when it was staged: files may have changed since, and a server's derived
    state is compared with what is read here. The files are mapped, not read: only pages that
    somebody looks at are in memory.
    """
    shards = [_verified(folder / shard_file(shard.index), shard) for shard in manifest.shards]
    tensors = {}
    for entry in manifest.tensors:
        raw = shards[entry.shard][entry.offset : entry.offset + entry.num_bytes]
        dtype = TORCH_DTYPES[entry.dtype]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        tensors[entry.name] = raw.view(dtype).view(entry.shape)
    return tensors


def _verified(path: Path, shard: ShardEntry) -> Tensor:
    if not path.is_file():
        raise WeightsCorrupt(f"{path}: no such file")
    raw: np.ndarray = np.zeros(0, np.uint8)
    if path.stat().st_size:
        raw = np.memmap(path, np.uint8, "c")
    if (found := xxhash.xxh3_128_hexdigest(raw.data)) != shard.checksum:
        raise WeightsCorrupt(f"{path}: checksum {found}, the manifest says {shard.checksum}")
    return torch.from_numpy(raw)


def receive_version(folder: Path, group: GroupTransfer) -> None:
    """Shards from a process group into files of `folder`, each verified before it has its name."""
    manifest = Manifest.model_validate_json((folder / INCOMING_FILE).read_bytes())

    def write(shard: ShardEntry, data: Tensor) -> None:
        raw = data.numpy()
        check_bytes(shard, xxhash.xxh3_128_hexdigest(raw.data))
        target = folder / shard_file(shard.index)
        # numpy's own `tofile` does not say that a disk is full
        target.with_suffix(".tmp").write_bytes(raw.data)
        target.with_suffix(".tmp").rename(target)

    receive_shards(group, manifest, write)


def build_version(
    policy_version: int, arch: Architecture, canonical: dict[str, Tensor], *, build: Derive = derive
) -> LoadedVersion:
    """Derive a candidate, once. WeightsCorrupt names the tensor that does not fit."""
    try:
        check_stored(canonical, arch)
        derived = build(arch, canonical)
    except (CheckpointInvalid, ValueError) as err:
        raise WeightsCorrupt(f"version {policy_version}: {err}") from err
    return LoadedVersion(policy_version, canonical, derived, _digests(effective(arch, derived)))


def check_effective(arch: Architecture, version: LoadedVersion) -> None:
    """WeightsCorrupt unless the derived state is that of the canonical tensors."""
    if (name := first_departing(arch, version)) is not None:
        raise WeightsCorrupt(f"version {version.policy_version}: {name} is not what was published")


def first_departing(arch: Architecture, version: LoadedVersion) -> str | None:
    """The first tensor whose derived state is not that of its canonical values; None: all are."""
    wanted = _digests(published(arch, version.canonical))
    names = sorted(wanted.keys() | version.digests.keys())
    return next((name for name in names if wanted.get(name) != version.digests.get(name)), None)


def check_expected(version: LoadedVersion, expected: str | None) -> None:
    """`OtherValues` unless the effective checksum is what the trainer expects, where it does."""
    if expected not in (None, version.checksum):
        raise OtherValues(
            f"version {version.policy_version}: effective checksum {version.checksum}, expected "
            f"was {expected}"
        )


def _digests(values: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: value_digest(value.cpu().numpy()) for name, value in values}


class Stopwatch:
    """Seconds of consecutive phases."""

    def __init__(self, started_at_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() if started_at_s is None else started_at_s

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now
