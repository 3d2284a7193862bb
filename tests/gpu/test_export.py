"""A version that is exported from a device: through pinned memory, the bytes of the host's."""

from pathlib import Path

from torch import Tensor

from services.trainer.export import export_version
from shared.quant.policy import POLICIES
from shared.weights.manifest import shard_file
from tests.tiny_deepseek_v4 import DEMO, random_weights


def export(weights: dict[str, Tensor], folder: Path) -> list[bytes]:
    folder.mkdir()
    manifest = export_version(
        weights.items(),
        folder,
        job_id="test",
        policy_version=1,
        policy=POLICIES["fp8"],
        max_shard_bytes=200_000,
    )
    assert len(manifest.shards) > 8  # more than are in memory at once
    shards = [(folder / shard_file(shard.index)).read_bytes() for shard in manifest.shards]
    return [manifest.model_dump_json().encode(), *shards]


def test_a_version_of_device_tensors_has_the_bytes_of_the_hosts(tmp_path: Path) -> None:
    weights = random_weights(DEMO, seed=1)
    expected = export(weights, tmp_path / "host")
    on_device = {name: tensor.cuda() for name, tensor in weights.items()}
    for attempt in range(3):  # pinned memory is taken again
        assert export(on_device, tmp_path / f"device-{attempt}") == expected
