"""What a server samples and scores is of one version, whole, and of the tokens asked for."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.sglang.client import ServerRefused
from shared.errors import Retryable
from shared.messages import SamplingParams
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer
from tests.integration.sglang_world import NEW, OLD, attached


async def test_tokens_with_another_label_are_refused_and_the_guard_sees_it(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        assert await world.versions.is_served()
        world.fake.forget()  # restarted by somebody else, faster than anybody looked
        with pytest.raises(ServerRefused, match="tokens are of version"):
            await world.sample()
        assert not await world.versions.is_served()


async def test_what_waits_at_the_gate_is_sampled_by_the_new_version(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        await world.engine.pause()
        waiting = asyncio.create_task(world.sample())
        await asyncio.sleep(0)
        number = await world.activate(NEW)
        assert world.engine.num_running == 0
        world.engine.go_on()
        assert await waiting == [(number, 4)]


async def test_hash_layers_that_are_told_as_zeros_are_read_from_the_versions_own_table(
    tmp_path: Path,
) -> None:
    """After an update from the new version's, and what other layers tell is kept as it is."""
    async with attached(FakeServer(), tmp_path) as world:
        world.engine.spec = replace(world.engine.spec, record_experts=True)
        other = dict(NEW)
        hashed = [name for name in NEW if name.endswith("tid2eid")]
        other |= {name: NEW[name].flip(0) for name in hashed}
        assert any(not torch.equal(other[name], NEW[name]) for name in hashed)
        for stored in (OLD, other):
            await world.activate(stored)
            request = GroupRequest(
                f"routed-{next(world.numbers)}",
                np.array(PROBE[0], np.int32),
                [0],
                SamplingParams(max_response_tokens=4),
                seed=1,
                with_routes=True,
            )
            (one,) = await world.engine.generate(request)
            assert one.routes is not None
            found = one.routes.expert_ids
            assert found is not None
            inputs = [*PROBE[0], *one.token_ids.tolist()][:-1]
            layers = [int(name.split(".")[1]) for name in hashed]
            for layer, name in zip(layers, hashed, strict=True):
                assert np.array_equal(found[:, layer], stored[name].numpy()[inputs])
            told = np.delete(found, layers, axis=1)
            assert told.size
            assert np.array_equal(told, np.broadcast_to(np.arange(told.shape[-1]), told.shape))


async def test_what_a_stream_brought_before_it_broke_is_kept(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path, stream_interval=2) as world:
        version = await world.activate(OLD)
        assert await world.sample() == [(version, 4)]
        world.fake.breaks_next_stream = True
        sampling = asyncio.create_task(world.sample(num_samples=2))
        async with asyncio.timeout(20):
            while world.fake.breaks_next_stream or world.engine.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        world.engine.open_gate()  # as the guard does once a server is there
        assert await sampling == [(version, 4)]
        assert world.fake.asked[-2:] == [[PROBE[0]] * 2, [[*PROBE[0], 7, 7]] * 2]


async def test_scores_of_other_tokens_are_refused_and_the_last_token_is_known(
    tmp_path: Path,
) -> None:
    """SGLang repeats the vocabulary's last token as 0 and scores it right."""
    async with attached(FakeServer(), tmp_path) as world:
        await world.activate(OLD)
        ids = [*PROBE[0], world.engine.spec.arch.vocab_size - 1, *PROBE[1]]
        (found,) = await world.engine.score_now([ids])
        np.testing.assert_allclose(found, reference_logprobs(OLD, ids), atol=1e-5)
        world.fake.chunk = 8
        with pytest.raises(
            ServerRefused, match="position 8 of 21 is of token 20, asked was token 21"
        ):
            await world.engine.score_now([ids])


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("asked", [None, 0])
async def test_a_score_that_an_update_cuts_short_is_of_one_version(
    tmp_path: Path, asked: int | None, is_early: bool
) -> None:
    """The update waits for the call; then the new version is scored, or the lost one refused."""
    async with attached(FakeServer(cuts_early=is_early), tmp_path) as world:
        await world.activate(OLD)
        world.fake.holds_next_score = True
        scoring = asyncio.create_task(world.engine.score(PROBE, 1.0, asked))
        await asyncio.wait_for(world.fake.holding.wait(), 20)
        new = await world.activate(NEW)
        if asked is None:
            version, found = await asyncio.wait_for(scoring, 20)
            assert version == new
            np.testing.assert_allclose(found[0], reference_logprobs(NEW, PROBE[0]), atol=1e-5)
        else:
            with pytest.raises(Retryable, match="policy version 0 is not held; version 1 is"):
                await asyncio.wait_for(scoring, 20)


async def test_a_broken_connection_is_no_lost_server(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        world.fake.breaks_next_health = True
        world.fake.calls.clear()
        assert await world.engine.server.is_well()
        assert world.fake.calls == ["/health_generate"] * 2


@pytest.mark.parametrize("stream_interval", [0, 1])
async def test_a_group_ends_once_enough_of_its_samples_are_complete(
    tmp_path: Path, stream_interval: int
) -> None:
    """Two of four never end: the first two to be complete are enough, the others are aborted, each
    by its own id, and the server is free for the next group."""
    async with attached(FakeServer(), tmp_path, stream_interval=stream_interval) as world:
        number = await world.activate(OLD)
        world.fake.endless = frozenset({0, 2})
        request = GroupRequest(
            "group",
            np.array(PROBE[0], np.int32),
            [0, 1, 2, 3],
            SamplingParams(max_response_tokens=4),
            seed=1,
        )
        done = await world.engine.generate(replace(request, enough=2))
        assert [one.finish_reason for one in done] == ["abort", "length", "abort", "length"]
        assert [one.version_spans for one in done] == [[(number, n)] for n in (1, 4, 1, 4)]
        assert {rid.rpartition(".")[2] for rid in world.fake.aborted} == {"0;", "2;"}
        assert world.engine.num_running == 0
        world.fake.endless, before = frozenset(), len(world.fake.aborted)
        again = await world.engine.generate(replace(request, request_id="next", enough=4))
        assert {one.finish_reason for one in again} == {"length"}
        assert len(world.fake.aborted) == before


async def test_samples_of_a_group_that_ended_early_are_the_ones_that_were_complete(
    tmp_path: Path,
) -> None:
    """What was cut short goes on where it was, if it is the one that is needed after all."""
    async with attached(FakeServer(), tmp_path) as world:
        number = await world.activate(OLD)
        world.fake.endless = frozenset({0})
        request = GroupRequest(
            "group",
            np.array(PROBE[0], np.int32),
            [0, 1],
            SamplingParams(max_response_tokens=4),
            seed=1,
        )
        first, second = await world.engine.generate(replace(request, enough=1))
        assert (first.finish_reason, second.finish_reason) == ("abort", "length")
        world.fake.endless = frozenset()
        rest = replace(request, request_id="rest", samples=[0], partial={0: first})
        (whole,) = await world.engine.generate(rest)
        assert whole.version_spans == [(number, 4)]
        assert whole.token_ids[:1].tolist() == first.token_ids.tolist()


async def test_what_the_server_refuses_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A request that is wrong is no lost server: neither the gate nor the others suffer."""
    for stream_interval in (0, 2):
        async with attached(FakeServer(), tmp_path, stream_interval=stream_interval) as world:
            number = await world.activate(OLD)
            world.fake.forbidden = 255
            wrong = GroupRequest(
                "wrong", np.array([255, 1], np.int32), [0], SamplingParams(max_response_tokens=4), 1
            )
            with pytest.raises(ValueError, match=r"400.*not allowed"):
                await asyncio.wait_for(world.engine.generate(wrong), 60)
            assert await asyncio.wait_for(world.sample(), 60) == [(number, 4)]
            assert world.engine.num_running == 0


async def test_control_calls_do_not_wait_for_sequences(tmp_path: Path) -> None:
    """Each sequence of a group with spare samples has a call of its own."""
    many = 130
    fake = FakeServer()
    async with attached(fake, tmp_path) as world:
        await world.activate(OLD)
        fake.endless = frozenset(range(many))
        request = GroupRequest(
            "many",
            np.array(PROBE[0], np.int32),
            list(range(many)),
            SamplingParams(max_response_tokens=4),
            seed=1,
            enough=many - 1,
        )
        running = asyncio.create_task(world.engine.generate(request))
        async with asyncio.timeout(20):
            while fake.running < many:  # noqa: ASYNC110  the server's count
                await asyncio.sleep(0.02)
        await world.engine.server.client.ask_health(timeout_s=2)
        await world.engine.abort("many")
        assert len(await asyncio.wait_for(running, 20)) == many
