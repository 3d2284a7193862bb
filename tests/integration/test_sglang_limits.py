"""An update of an SGLang server ends in time, and whoever waits for it waits for the way back."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.serving import activation_limit_s
from shared.errors import RemoteError, WeightsCorrupt
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.protocol import CommitUpdate, Probe, ProbeSequence
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs, variant
from tests.integration.fake_sglang import FakeServer, serving
from tests.integration.rollout_world import write_version
from tests.integration.sglang_world import NEW, OLD, attached


async def test_a_probe_that_is_not_answered_ends_with_the_update(tmp_path: Path) -> None:
    """The call for scores has a limit of half an hour, the update one of seconds."""
    async with attached(FakeServer(), tmp_path, deadline_s=2.0) as world:
        old = await world.activate(OLD)
        world.fake.faults = ["hangs_in_probe"]
        with pytest.raises(WeightsCorrupt, match=r"ReadTimeout|waited 2 s"):
            await asyncio.wait_for(world.activate(NEW), 20)
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


def staged(folder: Path, seed: int) -> CommitUpdate:
    """A version in `folder`, and its commit."""
    stored = variant(seed)
    manifest = write_version(folder, stored, seed)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    sequences = [
        ProbeSequence(token_ids=ids, logprobs=reference_logprobs(stored, ids).tolist())
        for ids in PROBE
    ]
    return CommitUpdate(probe=Probe(sequences=sequences, max_mean_abs_delta=1e-3))


async def test_the_service_waits_until_the_old_version_is_back(tmp_path: Path) -> None:
    """Its wait is not the server's: a load that hangs until the deadline has yet to be undone."""
    deadline_s, fake = 3.0, FakeServer(faults=["none", "hangs"])
    commits = [staged(tmp_path / f"v{seed}", seed) for seed in (0, 1)]
    async with serving(fake):
        server = ServerSpec(str(CHECKPOINT), url=fake.url, update_deadline_s=deadline_s)
        spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=server)
        limit_s = activation_limit_s(spec, deadline_s)
        async with running_engine(spec) as engine:
            await engine.activate(tmp_path / "v0", commits[0], timeout_s=limit_s)
            with pytest.raises(RemoteError, match="WeightsCorrupt"):
                await engine.activate(tmp_path / "v1", commits[1], timeout_s=limit_s)
            sampling = SamplingParams(max_response_tokens=4)
            request = GroupRequest("r", np.array(PROBE[0], np.int32), [0], sampling, seed=1)
            (one,) = await engine.generate(request, timeout_s=20)
            assert one.version_spans == [(0, 4)]
            assert not engine.died.is_set()


def test_the_longest_update_has_room_for_each_fresh_server() -> None:
    ours = ServerSpec("c", start_deadline_s=100, update_deadline_s=10)
    attached_to = ServerSpec("c", url="http://s", start_deadline_s=100, update_deadline_s=10)
    assert ours.longest_update_s > 3 * 100 + 6 * 10
    assert attached_to.longest_update_s > 100 + 3 * 10
