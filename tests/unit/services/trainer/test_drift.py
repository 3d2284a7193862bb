"""Which samples are attributed, and that the versions they need are whole meanwhile."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.drift import DriftAttribution, NothingToAttribute
from services.trainer.keeper import Climbers
from services.trainer.versions import VersionStore
from shared.job_proof import AttributionSection
from shared.messages import TrainingBatch, TrainingSample
from shared.parity.attribution import RUNGS
from shared.weights.manifest import shard_file
from tests.unit.services.trainer.test_versions import publish, tidy


class Ranks:
    """The keeper's part of it: notes what lies in the folders that it is given.

    It asks as often as ranks are lost, and the last ones have what `held` says.
    """

    def __init__(self, *, held: Sequence[int] = (4,)) -> None:
        self.held = held
        self.seen: dict[int, bytes] = {}
        self.num_samples = 0

    async def climb(
        self, choose: Callable[[int], Awaitable[Climbers]], *, temperature: float
    ) -> dict[str, list[float]]:
        for step in self.held:
            samples, folders = await choose(step)
        self.seen = {v: (path / shard_file(0)).read_bytes() for v, path in folders.items()}
        self.num_samples = len(samples)
        return {name: [-1.0] * (2 * len(samples)) for name in RUNGS}


def same(step: int) -> int:
    return step


def attribution(store: VersionStore, ranks: Any) -> DriftAttribution:
    settings, unused = AttributionSection(samples=3), None
    return DriftAttribution(ranks, store, settings=settings, record=unused, events=unused)  # type: ignore[arg-type]


def batch(*versions: int) -> TrainingBatch:
    samples = [
        TrainingSample(
            rollout_id=f"j.g000000.{i}", group_id="j.g000000", token_ids=np.arange(3),
            num_prompt_tokens=1, sampler_logprobs=np.full(2, -1.5), advantage=1.0, reward=1.0,
            oldest_version=version,
        )
        for i, version in enumerate(versions)
    ]  # fmt: skip
    return TrainingBatch(
        job_id="j", step=5, policy_version=4, temperature=1.0, samples=samples,
        group_ids=["j.g000000"],
    )  # fmt: skip


async def test_versions_kept_as_changes_are_rebuilt_and_shrunk_again(tmp_path: Path) -> None:
    store, contents, ranks = VersionStore(tmp_path), {}, Ranks()
    for version in range(5):
        contents[version] = publish(store, version)
        tidy(store, {version}, keep_last=50)
    assert not store.is_whole(3)
    found = await attribution(store, ranks).of(batch(3, 4, 2, 2), held=same)
    assert ranks.seen == {2: contents[2], 3: contents[3]}  # and not the one that is held
    assert (ranks.num_samples, found.num_tokens) == (3, 6)
    assert found.whole == pytest.approx(0.5)
    tidy(store, {4}, keep_last=50)
    assert not store.is_whole(3)


async def test_a_step_whose_versions_are_gone_is_told_so(tmp_path: Path) -> None:
    store, ranks = VersionStore(tmp_path), Ranks()
    publish(store, 4)
    found = await attribution(store, ranks).of(batch(2, 4, 3), held=same)
    assert (ranks.num_samples, found.num_tokens) == (1, 2)
    with pytest.raises(NothingToAttribute, match=r"sampled by versions \[2, 3\], of which none"):
        await attribution(store, ranks).of(batch(2, 3), held=same)


async def test_what_was_rebuilt_for_ranks_that_were_lost_is_shrunk_again(tmp_path: Path) -> None:
    store, ranks = VersionStore(tmp_path), Ranks(held=(4, 4))
    for version in range(5):
        publish(store, version)
        tidy(store, {version}, keep_last=50)
    await attribution(store, ranks).of(batch(3, 4), held=same)
    tidy(store, {4}, keep_last=50)
    assert not store.is_whole(3)
