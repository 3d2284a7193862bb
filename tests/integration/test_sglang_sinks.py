"""Copies of the attention sinks that an update leaves behind: seen however small, or refused.

The steps are small and the probe's bound is wide: it has nothing to say here. What decides is what
the class of model tells of its copies, and at the start whether it tells at all.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.rollout.engine.sglang.client import ServerRefused
from services.rollout.engine.sglang.identity import Served
from services.rollout.engine.sglang.server import ServerFailed
from shared.errors import WeightsCorrupt
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer
from tests.integration.sglang_world import OLD, Attached, attached, stepped
from tests.integration.test_sglang_router import routed

NEXT = stepped(OLD, 1)
WIDE = {"bound": 5.0, "noise": 0.02}
CLASS = "DeepseekV4ForCausalLM"


def two_ranks(**fields: Any) -> FakeServer:
    """With DeepSeek-V4 of its own, whose sinks stay behind."""
    given: dict[str, Any] = {"architecture": CLASS, "ranks": 2, "stale": "attn_sink"}
    return FakeServer(**given | fields)


async def departure(world: Attached) -> float:
    """Mean |delta log p| of what is sampled from what the trainer has."""
    (found, *_) = await world.engine.score_now(PROBE)
    return float(np.abs(found - reference_logprobs(NEXT, PROBE[0])).mean())


async def test_a_small_stale_copy_is_unseen_by_the_probe(tmp_path: Path) -> None:
    """What the other tests are about: nobody asks the class of model, and other sinks serve."""
    fake = two_ranks(tells_sinks=True, dialect="bare", version="0.5.17")
    async with attached(fake, tmp_path, tensor_parallel=2, platform="cuda") as world:
        world.versions._served = Served("bare")
        await world.activate(OLD, **WIDE)
        fake.faults = ["keeps_stale_sinks"]
        await world.activate(NEXT, **WIDE)
        assert 1e-5 < await departure(world) < 0.02
        assert await world.engine.server.client.sinks_departure() == pytest.approx(0.02)


@pytest.mark.parametrize("dialect", ["bare", "session", "post_process"])
async def test_a_small_stale_copy_is_healed_on_a_server_of_ours(
    dialect: str, tmp_path: Path
) -> None:
    """By the server where it has a call for that, else by a fresh one of the new version."""
    fake = two_ranks(tells_sinks=True, dialect=dialect)
    where: dict[str, Any] = {"tensor_parallel": 2, "platform": "cuda", "is_ours": True}
    async with attached(fake, tmp_path, **where) as world:
        await world.activate(OLD, **WIDE)
        fake.started_from.clear()
        fake.faults = ["keeps_stale_sinks"]
        with structlog.testing.capture_logs() as logs:
            number = await world.activate(NEXT, **WIDE)
        (stale,) = [one for one in logs if one["event"] == "sglang_state_stale"]
        assert "a copy of other attention sinks" in stale["error"]
        assert stale["remedy"] == ("restart" if dialect == "bare" else "rebuild")
        assert fake.started_from == ([f"v{number:08d}"] if dialect == "bare" else [])
        assert await world.sample() == [(number, 4)]
        assert await departure(world) < 1e-5


async def test_a_small_stale_copy_of_an_attached_server_is_refused(tmp_path: Path) -> None:
    """Which has no call to derive it anew: the old version serves, with its own sinks."""
    fake = two_ranks(tells_sinks=True, dialect="bare")
    async with attached(fake, tmp_path, tensor_parallel=2, platform="cuda") as world:
        old = await world.activate(OLD, **WIDE)
        fake.faults = ["keeps_stale_sinks"]
        with pytest.raises(WeightsCorrupt, match=r"other attention sinks .* difference 0\.02"):
            await world.activate(NEXT, **WIDE)
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


async def test_the_way_back_is_refused_with_other_sinks_too(tmp_path: Path) -> None:
    """And healed by a fresh server of the old version."""
    fake = two_ranks(tells_sinks=True, dialect="bare")
    where: dict[str, Any] = {"tensor_parallel": 2, "platform": "cuda", "is_ours": True}
    async with attached(fake, tmp_path, **where) as world:
        await world.activate(OLD, **WIDE)
        old = await world.activate(NEXT, **WIDE)
        fake.started_from.clear()
        fake.faults = ["says_no", "keeps_stale_sinks"]
        fake._weights = fake._weights | {n: t for n, t in OLD.items() if "attn_sink" in n}
        with pytest.raises(WeightsCorrupt, match="Failed to load"):
            await world.activate(OLD, **WIDE)
        assert fake.started_from == [f"v{old:08d}"]
        assert await world.sample() == [(old, 4)]
        assert await departure(world) < 1e-5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dialect": "bare", "version": "0.5.17"}, "SGLANG_EXTERNAL_MODEL_PACKAGE"),
        ({"dialect": "session", "version": "0.5.22"}, "or take 0.5.23 or later"),
        ({"dialect": "post_process", "version": "0.5.23"}, "may attend with copies of the first"),
        ({"dialect": "session", "version": "0.5.23"}, None),
        ({"dialect": "session", "version": "0.6.0rc1"}, None),
        ({"dialect": "bare", "version": "0.5.17", "tells_sinks": True}, None),
        ({"dialect": "bare", "version": "0.5.17", "has_ranks_apart": True}, None),
        ({"dialect": "bare", "version": "0.5.17", "ranks": 1}, None),
    ],
)
async def test_an_attached_server_is_refused_that_may_keep_its_first_sinks(
    fields: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    """However the job's own setting stands: the server says how many ranks it has."""
    if words is None:
        with structlog.testing.capture_logs() as logs:
            async with attached(two_ranks(**fields), tmp_path, platform="cuda") as world:
                number = await world.activate(OLD)
                assert await world.sample() == [(number, 4)]
        is_trusted = "sglang_sinks_are_not_told" in {one["event"] for one in logs}
        assert is_trusted == (fields["dialect"] == "session")
        return
    with pytest.raises(ServerRefused, match=words):
        async with attached(two_ranks(**fields), tmp_path, platform="cuda"):
            pass


async def test_a_server_of_ours_has_to_have_loaded_our_class(tmp_path: Path) -> None:
    """Whatever its version: SGLang serves its own class where it cannot import another."""
    with pytest.raises(ServerRefused, match=r"did not load the model of services\..*gpu_model"):
        async with attached(two_ranks(), tmp_path, platform="cuda", is_ours=True):
            pass


async def test_a_server_that_came_back_with_another_class_is_refused(tmp_path: Path) -> None:
    fake = two_ranks(tells_sinks=True, version="0.5.22")
    async with attached(fake, tmp_path, tensor_parallel=2, platform="cuda") as world:
        await world.activate(OLD)
        fake.tells_sinks = False
        with pytest.raises(ServerRefused, match="SGLANG_EXTERNAL_MODEL_PACKAGE"):
            await world.versions.recover()


async def test_a_class_that_stops_telling_serves_nothing(tmp_path: Path) -> None:
    """No version is proven on it any more, the old one neither."""
    fake = two_ranks(tells_sinks=True)
    async with attached(fake, tmp_path, tensor_parallel=2, platform="cuda") as world:
        await world.activate(OLD)
        fake.tells_sinks = False
        with pytest.raises(ServerFailed, match="is not ours to restart"):
            await world.activate(NEXT)
        assert not await world.versions.is_served()


async def test_every_worker_of_a_router_has_to_tell(tmp_path: Path) -> None:
    first, other = two_ranks(tells_sinks=True), two_ranks()
    async with routed(tmp_path, first, other) as world:
        client = world.engine.server.client
        assert await client.sinks_departure() == 0
        first.tells_sinks = False
        assert await client.sinks_departure() is None
