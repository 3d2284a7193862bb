"""A published version's values, read back: held by the model during a pass, or digested."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from services.trainer.engine.agreement import together
from services.trainer.export import Exchange
from services.trainer.models.deepseek_v4.weights import load_weights, release_tensors
from shared.errors import WeightsCorrupt
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.published import dequantised, published_digests, published_names
from shared.quant.policy import is_scale
from shared.weights.dtypes import TORCH_DTYPES
from shared.weights.effective import effective_checksum
from shared.weights.stored import StoredVersion


@contextmanager
def holding_version(model: nn.Module, folder: Path) -> Iterator[None]:
    """Passes inside run on the values that servers read from `folder`; then the model has its own
    again. ValueError if the folder does not hold a whole version."""
    values = published_values(folder)
    kept = [(weight, weight.clone()) for _, weight in release_tensors(model)]
    try:
        load_weights(model, values)
        yield
    finally:
        with torch.no_grad():
            for weight, own in kept:
                weight.copy_(own)


def published_values(folder: Path) -> Mapping[str, Tensor]:
    """FP32 (or int64) values by release name."""
    stored = _Stored(folder)
    return {name: dequantised(stored, name) for name in stored if not is_scale(name)}


def published_checksum(
    folder: Path, arch: Architecture, exchange: Exchange, *, num_threads: int = 1
) -> str:
    """The effective checksum of the whole version in `folder`. Collective.

    Each rank digests the part that it has written; where there are more or fewer ranks than parts
    they take its shards in turns, from the folder that all of them share. Memory: one tensor a
    thread. ValueError, or WeightsCorrupt, names the tensor that is not here or not what was
    written.
    """
    num_ranks = len(exchange.gather(b""))
    with together():
        stored, names = _Stored(folder), published_names(arch)
        own = [name for name in names if stored.reader_of(name, num_ranks) == exchange.rank]
        digests = published_digests(stored, own, num_threads=num_threads)
    parts = exchange.gather(json.dumps(digests).encode())
    return effective_checksum(dict(chain.from_iterable(json.loads(part).items() for part in parts)))


class _Stored(Mapping[str, Tensor]):
    """Codes and scales by name, each copied and checked when it is asked for."""

    def __init__(self, folder: Path) -> None:
        stored = StoredVersion.open(folder)
        if stored is None:
            raise ValueError(f"{folder} holds no whole version")
        self._folder, self._stored = folder, stored
        self._shards = {entry.name: entry.shard for entry in stored.manifest.tensors}

    def reader_of(self, name: str, num_ranks: int) -> int:
        """The rank that wrote it, or one of so many others."""
        if name not in self._shards:
            raise ValueError(f"{self._folder}: {name} was not published")
        manifest, index = self._stored.manifest, self._shards[name]
        in_parts = manifest.num_parts == num_ranks
        return manifest.shards[index].part if in_parts else index % num_ranks

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._shards:
            raise KeyError(name)
        found = self._stored.tensor(name)
        if found is None:
            raise ValueError(f"{self._folder}: the shard of {name} is not here")
        entry, raw = found[0], found[1].copy()
        if xxhash.xxh3_128_hexdigest(raw.data) != entry.checksum:
            raise WeightsCorrupt(f"{self._folder}: {name} is not what was written")
        return torch.from_numpy(raw).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)
