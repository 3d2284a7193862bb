"""What one published version consists of: canonical tensors cut into shards, each checksummed.

Names and formats are the release's (codes and scales are separate tensors). The manifest is written
last, so a version without one is unfinished and never offered.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MANIFEST_FILE = "manifest.json"
INCOMING_FILE = "incoming.json"  # a manifest whose shards are not all there yet

DType = Literal["F32", "BF16", "F8_E4M3", "F8_E8M0", "I8", "I32", "I64"]
BYTES_PER_ITEM: dict[DType, int] = {
    "F32": 4,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "I32": 4,
    "I64": 8,
}
Size = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="xxh3-128, hexadecimal")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TensorEntry(_Strict):
    """Bytes [offset, offset + num_bytes) of shard `shard` are this tensor, C order."""

    name: str
    """As in a release."""
    shape: list[Size]
    """Of the whole tensor."""
    dtype: DType
    """As safetensors writes it."""
    shard: int = Field(ge=0)
    """The shard that it lies in."""
    offset: int = Field(ge=0)
    """Bytes from the shard's start."""
    num_bytes: int = Field(ge=0)
    """Its length."""
    checksum: Checksum

    @model_validator(mode="after")
    def _bytes_fit_shape(self) -> Self:
        expected = BYTES_PER_ITEM[self.dtype]
        for size in self.shape:
            expected *= size
        if expected != self.num_bytes:
            raise ValueError(
                f"{self.name}: {self.num_bytes} bytes, but {self.dtype}{self.shape} has {expected}"
            )
        return self


class ShardEntry(_Strict):
    """One file or ranged resource; `index` is its place in the manifest's list.

    `part` is the rank that owns the shard's tensors; its node has the file.
    """

    index: int = Field(ge=0)
    """From 0."""
    num_bytes: int = Field(ge=0)
    """Its length."""
    checksum: Checksum
    part: int = Field(0, ge=0)
    """The rank that wrote it."""


class DeltaTensor(_Strict):
    """Bytes [offset, offset + num_bytes) of a delta shard: what `apply_delta` reads, or all bytes.

    A tensor of the shard that is not listed is the base's, to the byte.
    """

    name: str
    """As in the manifest."""
    encoding: Literal["delta", "full"]
    """How its changes are written."""
    offset: int = Field(ge=0)
    """Bytes from the delta shard's start."""
    num_bytes: int = Field(ge=0)
    """Length of its changes."""


class DeltaShard(_Strict):
    """What turns the base's tensors into those of one shard."""

    num_bytes: int = Field(ge=0)
    """Its length."""
    checksum: Checksum
    tensors: list[DeltaTensor]
    """Those that it changes."""

    @model_validator(mode="after")
    def _tensors_lie_apart(self) -> Self:
        _check_distinct(self.tensors)
        _check_apart(self.tensors, self.num_bytes, "changes")
        return self


class Delta(_Strict):
    """The same version as changes of another; a shard without one (None) is sent whole.

    Delta shard i is served at `…/v1/weights/{version}/deltas/{i}`. The checksums of the result are
    those of the manifest: whoever rebuilds from a wrong base finds out.
    """

    base_version: int = Field(ge=0)
    """The version that the changes are of."""
    shards: list[DeltaShard | None]
    """One for each shard of the manifest."""


class Manifest(_Strict):
    """All tensors of `policy_version`. Shard i is served at `…/v1/weights/{version}/shards/{i}`."""

    format: Literal[1] = 1
    """Of this manifest."""
    job_id: str
    """The job that made it."""
    policy_version: int = Field(ge=0)
    """The version."""
    shards: list[ShardEntry]
    """All of them, by index."""
    tensors: list[TensorEntry]
    """All of them."""
    delta: Delta | None = None
    """The same as changes of an earlier version, where there is one."""

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def num_parts(self) -> int:
        return max((shard.part for shard in self.shards), default=0) + 1

    @property
    def delta_bytes(self) -> int:
        """What a server that holds the base pulls; all bytes if there is no delta."""
        if self.delta is None:
            return self.num_bytes
        both = zip(self.shards, self.delta.shards, strict=True)
        return sum((changes or shard).num_bytes for shard, changes in both)

    def without_delta(self) -> Self:
        return self.model_copy(update={"delta": None})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for place, shard in enumerate(self.shards):
            if shard.index != place:
                raise ValueError(f"shard {place} carries index {shard.index}")
        _check_distinct(self.tensors)
        by_shard: list[list[TensorEntry]] = [[] for _ in self.shards]
        for tensor in self.tensors:
            if tensor.shard >= len(self.shards):
                raise ValueError(f"{tensor.name}: shard {tensor.shard} of {len(self.shards)}")
            by_shard[tensor.shard].append(tensor)
        for shard, tensors in zip(self.shards, by_shard, strict=True):
            _check_apart(tensors, shard.num_bytes, f"shard {shard.index}")
        if self.delta is not None and len(self.delta.shards) != len(self.shards):
            raise ValueError(f"{len(self.delta.shards)} deltas for {len(self.shards)} shards")
        return self


def _check_distinct(tensors: Iterable[TensorEntry | DeltaTensor]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"{tensor.name} is listed twice")
        names.add(tensor.name)


def _check_apart(tensors: Iterable[TensorEntry | DeltaTensor], num_bytes: int, where: str) -> None:
    """ValueError unless all bytes are within `num_bytes`, and no two tensors share one."""
    before, end = "", 0
    for tensor in sorted(tensors, key=lambda one: (one.offset, one.num_bytes)):
        if tensor.num_bytes and tensor.offset < end:
            raise ValueError(
                f"{tensor.name} begins at {tensor.offset} of {where}, inside {before}, which ends "
                f"at {end}"
            )
        if tensor.offset + tensor.num_bytes > end:
            before, end = tensor.name, tensor.offset + tensor.num_bytes
        if end > num_bytes:
            raise ValueError(f"{tensor.name} ends at {end}, beyond {where} of {num_bytes} bytes")


def shard_file(index: int) -> str:
    return f"shard-{index:05d}.bin"


def delta_file(index: int) -> str:
    return f"delta-{index:05d}.bin"
