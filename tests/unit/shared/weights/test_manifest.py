"""A manifest whose byte ranges make no sense is refused with the tensor's name."""

import pytest
from pydantic import ValidationError

from shared.weights.manifest import DeltaShard, DeltaTensor, Manifest, ShardEntry, TensorEntry
from shared.weights.protocol import ProbeSequence

CHECKSUM = "0" * 32
SHARDS = [ShardEntry(index=i, num_bytes=size, checksum=CHECKSUM) for i, size in enumerate((12, 4))]


def tensor(name: str, offset: int, num_bytes: int, *, shard: int = 0) -> TensorEntry:
    return TensorEntry(
        name=name,
        shape=[num_bytes],
        dtype="I8",
        shard=shard,
        offset=offset,
        num_bytes=num_bytes,
        checksum=CHECKSUM,
    )


def manifest(*tensors: TensorEntry) -> Manifest:
    return Manifest(job_id="j", policy_version=1, shards=SHARDS, tensors=list(tensors))


def test_tensors_that_lie_apart_in_any_order_are_taken() -> None:
    entries = [
        tensor("c", 8, 4),
        tensor("a", 0, 8),
        tensor("none", 8, 0),
        tensor("d", 0, 4, shard=1),
    ]
    assert manifest(*entries).num_bytes == 16


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([("a", 0, 8, 0), ("b", 7, 2, 0)], "b begins at 7 of shard 0, inside a, which ends at 8"),
        ([("b", 2, 2, 0), ("a", 0, 8, 0)], "b begins at 2 of shard 0, inside a, which ends at 8"),
        ([("a", 4, 4, 0), ("b", 4, 4, 0)], "b begins at 4 of shard 0, inside a"),
        ([("a", 0, 8, 0), ("i", 4, 0, 0), ("b", 5, 1, 0)], "b begins at 5 of shard 0, inside a"),
        ([("a", 5, 8, 0)], "a ends at 13, beyond shard 0 of 12 bytes"),
        ([("a", 10**15, 1, 1)], "a ends at 1000000000000001, beyond shard 1 of 4 bytes"),
        ([("a", 0, 0, 1), ("b", 5, 0, 1)], "b ends at 5, beyond shard 1"),
        ([("a", 0, 4, 2)], "a: shard 2 of 2"),
        ([("a", 0, 4, 0), ("a", 4, 4, 0)], "a is listed twice"),
    ],
)
def test_a_tensor_that_is_no_range_of_its_own_is_named(
    tensors: list[tuple[str, int, int, int]], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        manifest(*(tensor(name, at, size, shard=shard) for name, at, size, shard in tensors))


@pytest.mark.parametrize("fields", [{"offset": -1}, {"shape": [-2, -2]}, {"num_bytes": -4}])
def test_sizes_below_zero_are_refused(fields: dict[str, object]) -> None:
    values = tensor("a", 0, 4).model_dump() | fields
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        TensorEntry.model_validate(values)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (("b", 5, 5), "b ends at 10, beyond changes of 9 bytes"),
        (("b", 3, 2), "b begins at 3 of changes, inside a, which ends at 4"),
        (("a", 4, 2), "a is listed twice"),
    ],
)
def test_changes_are_checked_likewise(second: tuple[str, int, int], sentence: str) -> None:
    first = DeltaTensor(name="a", encoding="full", offset=0, num_bytes=4)
    name, offset, num_bytes = second
    other = DeltaTensor(name=name, encoding="delta", offset=offset, num_bytes=num_bytes)
    with pytest.raises(ValidationError, match=sentence):
        DeltaShard(num_bytes=9, checksum=CHECKSUM, tensors=[first, other])


def test_a_probe_has_a_log_probability_for_each_token_but_the_first() -> None:
    assert ProbeSequence(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0]).num_context_tokens == 1
    with pytest.raises(ValidationError, match="1 log-probabilities for 3 tokens, 2 expected"):
        ProbeSequence(token_ids=[1, 2, 3], logprobs=[-1.0])
