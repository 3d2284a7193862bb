"""What an SGLang server is let sample, and when: calls that meet a pause, an abort, a failure."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.sglang import engine as gate
from services.rollout.engine.sglang.client import ServerRefused
from shared.errors import DeadlineExceeded, Retryable
from shared.messages import SamplingParams
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer
from tests.integration.sglang_world import NEW, OLD, Attached, attached

REQUEST = GroupRequest(
    "group", np.array(PROBE[0], np.int32), [0], SamplingParams(max_response_tokens=4), seed=1
)


async def until_running(world: Attached, num: int) -> None:
    async with asyncio.timeout(20):
        while world.fake.running < num:  # noqa: ASYNC110  the server's count
            await asyncio.sleep(0.01)


async def sampled_over_an_update(world: Attached, request: GroupRequest) -> tuple[Completion, int]:
    """What it runs is cut short by an update to this version, and goes on after it."""
    world.fake.endless = frozenset({0})
    running = asyncio.create_task(world.engine.generate(request))
    await until_running(world, 1)
    await world.engine.pause()
    world.fake.endless = frozenset()
    new = await world.activate(NEW)
    world.engine.go_on()
    (one,) = await asyncio.wait_for(running, 60)
    return one, new


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


async def test_a_pause_does_not_wait_for_a_call_that_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again soon at first; the longest time between two looks is for slow servers."""
    monkeypatch.setattr(gate, "_AWAY_S", (0.1, 60.0))
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.is_next_late = True
        sampling = asyncio.create_task(world.sample())
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        await asyncio.wait_for(world.engine.pause(), 60)
        assert await asyncio.wait_for(sampling, 60) == [(old, 4)]
        world.engine.go_on()
        assert await asyncio.wait_for(world.sample(), 60) == [(old, 4)]


async def test_a_server_that_generates_while_it_warms_up_is_not_up_yet(tmp_path: Path) -> None:
    """Taken for one that is, it would be lost at the first question for its health."""
    async with attached(FakeServer(), tmp_path) as world:
        world.fake.is_unwell = True
        starting = asyncio.create_task(world.engine.server.start(tmp_path))
        done, _ = await asyncio.wait({starting}, timeout=1)
        assert not done
        assert "/generate" in world.fake.calls
        world.fake.is_unwell = False
        await asyncio.wait_for(starting, 20)
        assert await world.engine.server.is_well()


async def test_a_server_that_is_never_well_is_said_not_to_be(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        server = world.engine.server
        server.spec, world.fake.is_unwell = replace(server.spec, start_deadline_s=1.0), True
        with pytest.raises(DeadlineExceeded, match=r"and be well \(GET .*/health_generate: 503"):
            await server.start(tmp_path)


async def test_a_pause_does_not_wait_for_an_abort_that_is_not_answered(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        world.fake.endless = frozenset({0})
        running = asyncio.create_task(world.engine.generate(REQUEST))
        await until_running(world, 1)
        world.fake.hangs_in_abort = True
        await asyncio.wait_for(world.engine.pause(), 60)
        assert world.engine.paused
        world.fake.endless = frozenset()
        world.engine.go_on()
        await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("stream_interval", [0, 1])
async def test_a_call_that_is_cut_short_before_the_scheduler_has_it_is_made_again(
    tmp_path: Path, stream_interval: int
) -> None:
    async with attached(
        FakeServer(cuts_early=True), tmp_path, stream_interval=stream_interval
    ) as world:
        await world.activate(OLD)
        one, new = await sampled_over_an_update(world, REQUEST)
        assert one.version_spans == [(new, 4)]


async def test_what_is_cut_short_in_the_servers_queue_is_sampled_anew(tmp_path: Path) -> None:
    """SGLang tells no routes of it, even where it tells tokens."""
    async with attached(FakeServer(cuts_queued=True), tmp_path) as world:
        world.engine.spec = replace(world.engine.spec, record_experts=True)
        await world.activate(OLD)
        one, new = await sampled_over_an_update(world, replace(REQUEST, with_routes=True))
        assert one.version_spans == [(new, 4)]
        assert one.routes is not None
        assert one.routes.num_tokens == len(PROBE[0]) + 3


async def test_what_runs_is_cut_short_before_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's pause looks only each second whether what it cuts short has ended."""
    monkeypatch.setattr(gate, "_CUT_S", 20.0)
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.endless = frozenset({0})
        running = asyncio.create_task(world.engine.generate(REQUEST))
        await until_running(world, 1)
        await world.engine.pause()
        assert world.fake.num_waits == 0
        world.fake.endless = frozenset()
        world.engine.go_on()
        (one,) = await asyncio.wait_for(running, 60)
        assert one.version_spans == [(old, 4)]


@pytest.mark.parametrize("what", ["update", "pause"])
async def test_a_server_whose_calls_do_not_come_home_is_not_left_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The update or the pause fails, and the old version is sampled as before."""
    monkeypatch.setattr(gate, "_HOME_S", 0.2)
    monkeypatch.setattr(gate, "_AWAY_S", (0.1, 0.1))
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.endless, world.fake.is_deaf = frozenset({0}), True
        running = asyncio.create_task(world.engine.generate(REQUEST))
        await until_running(world, 1)
        with pytest.raises(DeadlineExceeded, match="1 calls to come back"):
            await (world.activate(NEW) if what == "update" else world.engine.pause())
        assert world.fake.is_going_on
        world.fake.endless, world.fake.is_deaf = frozenset(), False
        assert await asyncio.wait_for(world.sample(), 60) == [(old, 4)]
        await world.engine.abort("group")
        await asyncio.wait_for(running, 60)


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
        await asyncio.wait_for(sampling, 60)


async def test_a_request_that_waits_at_the_gate_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """At once, with what it has, and the server never hears of it."""
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        await world.engine.pause()
        waiting = asyncio.create_task(world.engine.generate(REQUEST))
        async with asyncio.timeout(20):
            while not world.engine.num_waiting:  # noqa: ASYNC110  nobody is woken
                await asyncio.sleep(0.01)
        asked = world.fake.calls.count("/generate")
        await world.engine.abort("group")
        (one,) = await asyncio.wait_for(waiting, 60)
        assert (one.finish_reason, len(one.token_ids)) == ("abort", 0)
        assert world.engine.num_waiting == 0
        world.engine.go_on()
        assert world.fake.calls.count("/generate") == asked


async def test_an_abort_is_said_again_until_the_server_knows_the_sequence(tmp_path: Path) -> None:
    """SGLang answers success to an abort of what it has not heard of, and forgets it."""
    async with attached(FakeServer(), tmp_path) as world:
        version = await world.activate(OLD)
        world.fake.endless = frozenset({0})
        world.fake.arrives.clear()
        running = asyncio.create_task(world.engine.generate(REQUEST))
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        await world.engine.abort("group")
        async with asyncio.timeout(20):
            while not world.fake.aborted:  # noqa: ASYNC110  the server's list
                await asyncio.sleep(0.01)
        world.fake.arrives.set()
        (one,) = await asyncio.wait_for(running, 60)
        assert (one.finish_reason, one.version_spans) == ("abort", [(version, 1)])


FAILING = replace(REQUEST, request_id="bad", prompt_token_ids=np.array([255, 1], np.int32))


@pytest.mark.parametrize(
    ("status", "stream_interval", "error"),
    [(500, 0, ServerRefused), (500, 2, ServerRefused), (503, 0, Retryable), (503, 2, Retryable)],
)
async def test_a_request_that_the_server_cannot_serve_is_given_up_and_stops_nobody(
    tmp_path: Path, status: int, stream_interval: int, error: type[Exception]
) -> None:
    """It is asked three times while the gate stays open; being busy is not held against it."""
    fake = FakeServer(failing=255, failure=status)
    async with attached(fake, tmp_path, stream_interval=stream_interval) as world:
        version = await world.activate(OLD)
        asked = fake.calls.count("/generate")
        running = asyncio.create_task(world.engine.generate(FAILING))
        samples = [await asyncio.wait_for(world.sample(), 60) for _ in range(3)]
        assert samples == [[(version, 4)]] * 3
        with pytest.raises(error, match="3 calls in a row for bad brought nothing"):
            await asyncio.wait_for(running, 60)
        assert fake.calls.count("/generate") - asked == 3 + 3
        assert world.engine.num_running == 0


async def test_calls_that_a_server_lost_which_is_gone_wait_for_the_next(tmp_path: Path) -> None:
    """That is no fault of the request: it waits at the gate however often it happens."""
    fake = FakeServer(failing=255, failure=500)
    async with attached(fake, tmp_path) as world:
        version = await world.activate(OLD)
        fake.is_unwell = True
        running = asyncio.create_task(world.engine.generate(FAILING))
        for _ in range(4):
            async with asyncio.timeout(20):
                while not world.engine.num_waiting:  # noqa: ASYNC110  nobody is woken
                    await asyncio.sleep(0.01)
            world.engine.open_gate()  # as the guard does once a server is there
            await asyncio.sleep(0)
        fake.failing, fake.is_unwell = -1, False
        async with asyncio.timeout(20):
            while not running.done():
                world.engine.open_gate()
                await asyncio.sleep(0.01)
        assert (await running)[0].version_spans == [(version, 4)]


async def test_a_stop_at_a_token_that_nobody_asked_for_is_no_end(tmp_path: Path) -> None:
    """An attached server ends at its own end-of-text token, too; the sample goes on from it."""
    async with attached(FakeServer(own_end=9), tmp_path) as world:
        version = await world.activate(OLD)
        sampling = SamplingParams(max_response_tokens=4, stop_token_ids=[300])
        (one,) = await asyncio.wait_for(
            world.engine.generate(replace(REQUEST, sampling=sampling)), 10
        )
        assert one.token_ids.tolist() == [7, 9, 7, 7]
        assert (one.finish_reason, one.version_spans) == ("length", [(version, 4)])
