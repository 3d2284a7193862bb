"""What an SGLang server is let sample, and when: calls that meet a pause, an abort, a failure."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.sglang import engine as gate
from shared.errors import DeadlineExceeded
from shared.messages import SamplingParams
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer
from tests.integration.test_sglang_faults import NEW, OLD, Attached, attached

REQUEST = GroupRequest(
    "group", np.array(PROBE[0], np.int32), [0], SamplingParams(max_response_tokens=4), seed=1
)


async def until_running(world: Attached, num: int) -> None:
    async with asyncio.timeout(20):
        while world.fake.running < num:  # noqa: ASYNC110  the server's count
            await asyncio.sleep(0.01)


async def test_a_call_that_reached_the_server_after_the_pause_comes_home(tmp_path: Path) -> None:
    """It waits there until the server goes on, and an update must not wait for it in vain."""
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.is_next_late = True
        sampling = asyncio.create_task(world.sample())
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        async with asyncio.timeout(20):
            new = await world.activate(NEW)
            assert await sampling == [(old, 4)]
            assert await world.sample() == [(new, 4)]


async def test_a_score_that_reached_the_server_after_the_pause_is_of_the_old_version(
    tmp_path: Path,
) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.is_next_late = True
        scoring = asyncio.create_task(world.engine.score(PROBE, 1.0, None))
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        async with asyncio.timeout(20):
            await world.activate(NEW)
            version, found = await scoring
        assert version == old
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


async def test_a_pause_does_not_wait_for_a_call_that_came_after_it(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.is_next_late = True
        sampling = asyncio.create_task(world.sample())
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        await asyncio.wait_for(world.engine.pause(), 10)
        assert await asyncio.wait_for(sampling, 5) == [(old, 4)]
        world.engine.go_on()
        assert await asyncio.wait_for(world.sample(), 5) == [(old, 4)]


@pytest.mark.parametrize("what", ["update", "pause"])
async def test_a_server_whose_calls_do_not_come_home_is_not_left_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The update or the pause fails, and the old version is sampled as before."""
    monkeypatch.setattr(gate, "_HOME_S", 0.2)
    monkeypatch.setattr(gate, "_AWAY_S", 0.1)
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.endless, world.fake.is_deaf = frozenset({0}), True
        running = asyncio.create_task(world.engine.generate(REQUEST))
        await until_running(world, 1)
        with pytest.raises(DeadlineExceeded, match="1 calls to come back"):
            await (world.activate(NEW) if what == "update" else world.engine.pause())
        assert world.fake.is_going_on
        world.fake.endless, world.fake.is_deaf = frozenset(), False
        assert await asyncio.wait_for(world.sample(), 5) == [(old, 4)]
        await world.engine.abort("group")
        await asyncio.wait_for(running, 5)


async def test_who_goes_on_does_not_open_the_gate_of_an_update(tmp_path: Path) -> None:
    """What is half loaded is sampled by nobody, whatever a pause's end says."""
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        async with world.engine.quiet(hand_over=False, limit_s=20):
            world.engine.go_on()
            sampling = asyncio.create_task(world.sample())
            done, _ = await asyncio.wait({sampling}, timeout=0.2)
            assert not done
        world.engine.open_gate()
        await asyncio.wait_for(sampling, 5)
