"""Any of the last fifty versions can be served again, and then computes what it computed before."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.rollout.engine.weights import build_version, check_effective, read_canonical
from services.trainer.export import export_version
from services.trainer.versions import VersionStore
from shared.quant.policy import POLICIES
from tests.tiny_deepseek_v4 import DEMO, random_weights

ARCH = DEMO.with_format("fp8")
SERVED_AGAIN = (1, 9, 17, 34, 49, 50)


@pytest.mark.timeout(180)
def test_any_of_the_last_fifty_versions_is_served_again_with_an_equal_effective_checksum(
    tmp_path: Path,
) -> None:
    store = VersionStore(tmp_path)
    weights = random_weights(DEMO, seed=1)
    generator = torch.Generator().manual_seed(1)
    for version in range(51):
        publish(store, weights, version)
        if version in SERVED_AGAIN:
            store.keep_effective(version, effective_checksum(store, version))
        store.tidy({version}, keep_last=50, keep_bytes=2**40)
        step(weights, generator)
    kept = {one.policy_version: one for one in store.describe()}
    assert set(range(1, 51)) <= set(kept)
    whole = kept[50].stored_bytes
    assert sum(one.stored_bytes for one in kept.values()) < 0.5 * 50 * whole
    checksums = {store.effective(version) for version in SERVED_AGAIN}
    assert len(checksums) == len(SERVED_AGAIN)
    for version in SERVED_AGAIN:
        store.restore(version)
        assert effective_checksum(store, version) == store.effective(version)
        store.tidy({50}, keep_last=50, keep_bytes=2**40)


def publish(store: VersionStore, weights: dict[str, Tensor], version: int) -> None:
    base = store.newest_whole()
    export_version(
        weights.items(),
        store.fresh_path(version),
        job_id="test",
        policy_version=version,
        policy=POLICIES["fp8"],
        max_shard_bytes=2**20,
        base=None if base is None else store.path(base),
    )


def step(weights: dict[str, Tensor], generator: torch.Generator) -> None:
    """What an optimiser does at a small learning rate: a little everywhere."""
    for values in weights.values():
        if values.is_floating_point():
            values += 2e-5 * torch.randn(values.shape, generator=generator)


def effective_checksum(store: VersionStore, version: int) -> str:
    """Of a fresh load, as a server makes it."""
    manifest = store.manifest(version)
    assert manifest is not None
    loaded = build_version(version, ARCH, read_canonical(manifest, store.path(version)))
    check_effective(ARCH, loaded)
    return loaded.checksum
