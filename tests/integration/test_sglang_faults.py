"""A server that answers success proves nothing: each known fault is refused, the old serves.

The server is attached to, so that going back happens through its own update calls.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from services.rollout.engine.sglang.__main__ import started
from services.rollout.engine.sglang.client import ServerRefused
from services.rollout.engine.sglang.server import ServerFailed
from shared.errors import WeightsCorrupt
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer, Fault, serving
from tests.integration.sglang_world import NEW, OLD, attached, stepped


@pytest.mark.parametrize("dialect", ["session", "post_process", "bare"])
async def test_versions_are_replaced_in_each_dialect(dialect: str, tmp_path: Path) -> None:
    async with attached(FakeServer(dialect=dialect), tmp_path) as world:  # type: ignore[arg-type]
        for stored in (OLD, NEW, OLD, NEW):
            number = await world.activate(stored)
            assert await world.sample() == [(number, 4)]
        calls = world.fake.calls
        assert calls.count("/flush_cache") == calls.count("/update_weights_from_disk") == 4
        for at, path in enumerate(calls):
            if path == "/update_weight_version":  # labelled only when the probe has been scored
                assert calls[at - 1] == "/generate"
                assert calls[at + 1] == "/model_info"  # and the name is read back


FAULTS: list[Fault] = [
    "ignores_weights",
    "keeps_stale_copy",
    "says_no",
    "refuses",
    "drops_connection",
    "hangs",
    "labels_nothing",
    "garbles_tables",
    "asserts",
    "dies",
    "keeps_prefixes",
    "keeps_prefixes_secretly",
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_refused_and_the_old_version_serves(fault: Fault, tmp_path: Path) -> None:
    deadline_s = 5.0 if fault == "hangs" else 20.0
    async with attached(FakeServer(), tmp_path, deadline_s=deadline_s) as world:
        old = await world.activate(OLD)
        world.fake.faults = [fault]
        with pytest.raises(WeightsCorrupt):
            await world.activate(NEW)
        assert world.engine.policy_version == old
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)
        number = await world.activate(NEW)
        assert await world.sample() == [(number, 4)]


async def test_one_small_step_that_is_not_taken_is_seen_below_the_probes_bound(
    tmp_path: Path,
) -> None:
    """A step of 1e-4 moves scores by 1e-3, and a job's bound is hundreds of times that."""
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD, bound=0.5)
        world.fake.faults = ["ignores_weights"]
        with pytest.raises(WeightsCorrupt, match="did not move as the trainer did"):
            await world.activate(stepped(OLD, 1), bound=0.5)
        assert await world.sample() == [(old, 4)]
        new = await world.activate(stepped(OLD, 1), bound=0.5)
        assert await world.sample() == [(new, 4)]
        same = await world.activate(stepped(OLD, 1), bound=0.5)  # nothing has to move
        assert await world.sample() == [(same, 4)]


async def test_a_step_that_is_not_taken_is_seen_under_any_noise(tmp_path: Path) -> None:
    """Where engine and trainer agree badly nothing tells a small step from noise but this: the
    scores are to the last bit those of the version before."""
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD, bound=0.5, noise=0.02)
        world.fake.faults = ["ignores_weights"]
        with pytest.raises(WeightsCorrupt, match="to the last bit those of the version before"):
            await world.activate(stepped(OLD, 1), bound=0.5, noise=0.02)
        assert await world.sample() == [(old, 4)]


@pytest.mark.parametrize(
    "stale",
    ["attn_sink", "layers.2.attn", ".ffn.gate", "layers.1.", "hc_"],
)
async def test_a_copy_that_is_stale_in_part_is_refused_at_the_first_small_step(
    tmp_path: Path, stale: str
) -> None:
    """A small part of the probe's bound is enough where the two sides agree as well as FP32."""
    async with attached(FakeServer(stale=stale), tmp_path) as world:
        old = await world.activate(OLD, bound=0.5)
        world.fake.faults = ["keeps_stale_copy"]
        with pytest.raises(WeightsCorrupt, match=f"since version {old} the engine did not move"):
            await world.activate(stepped(OLD, 1), bound=0.5)
        assert await world.sample() == [(old, 4)]
        number = await world.activate(stepped(OLD, 1), bound=0.5)
        assert await world.sample() == [(number, 4)]


async def test_a_copy_that_is_stale_in_part_adds_up_against_the_first_version(
    tmp_path: Path,
) -> None:
    """One step hides in the noise of the two sides; that the copy never moves does not."""
    async with attached(FakeServer(stale="attn"), tmp_path) as world:
        first = await world.activate(OLD, bound=5.0, noise=0.002)
        world.fake.faults = ["keeps_stale_copy"] * 40
        taken: list[int] = []

        async def take_steps() -> None:
            for number in range(1, 40):
                await world.activate(stepped(OLD, number), bound=5.0, noise=0.002)
                taken.append(number)

        with pytest.raises(WeightsCorrupt, match=f"since version {first} the engine did not move"):
            await take_steps()
        assert 0 < len(taken) < 39


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("dialect", ["session", "post_process"])
async def test_sinks_that_are_stale_are_derived_anew_by_the_server_itself(
    tmp_path: Path, dialect: str, is_ours: bool
) -> None:
    """No fresh server is needed where it has a call for it, which an attached one could not be."""
    fake = FakeServer(dialect=dialect, stale="attn_sink")  # type: ignore[arg-type]
    async with attached(fake, tmp_path, tensor_parallel=2, is_ours=is_ours) as world:
        await world.activate(OLD)
        fake.started_from.clear()
        fake.faults = ["keeps_stale_sinks"]
        number = await world.activate(NEW)
        assert fake.started_from == []
        assert await world.sample() == [(number, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(NEW, PROBE[0]), atol=1e-5)


async def test_sinks_are_derived_anew_on_the_way_back_too(tmp_path: Path) -> None:
    """Of a server that keeps them at every load, and that nobody can start again."""
    fake = FakeServer(stale="attn_sink")
    async with attached(fake, tmp_path, tensor_parallel=2) as world:
        old = await world.activate(OLD)
        fake.faults = ["keeps_stale_sinks"] * 2
        with pytest.raises(WeightsCorrupt, match="probe"):
            await world.activate(NEW, noise=1.0)
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


async def test_a_session_that_was_left_open_is_closed_first(tmp_path: Path) -> None:
    """By whoever broke off in the middle of it: the server would begin no other."""
    fake = FakeServer(stale="attn_sink")
    async with attached(fake, tmp_path) as world:
        await world.activate(OLD)
        fake.session = "loaded"
        fake.faults = ["keeps_stale_sinks"]
        number = await world.activate(NEW)
        assert fake.session == "none"
        assert await world.sample() == [(number, 4)]


async def test_a_server_without_a_call_for_it_is_replaced_for_its_stale_sinks(
    tmp_path: Path,
) -> None:
    fake = FakeServer(dialect="bare", stale="attn_sink")
    async with attached(fake, tmp_path, tensor_parallel=2, is_ours=True) as world:
        await world.activate(OLD)
        fake.faults = ["keeps_stale_sinks"]
        number = await world.activate(NEW)
        assert fake.started_from[-1] == f"v{number:08d}"


async def test_prefixes_that_a_rebuilt_server_keeps_are_seen(tmp_path: Path) -> None:
    """What was computed under the stale copy is dropped, and a prompt looked for once more."""
    fake = FakeServer(stale="attn_sink")
    async with attached(fake, tmp_path, tensor_parallel=2) as world:
        old = await world.activate(OLD)
        fake.faults = ["keeps_stale_sinks"]
        fake.keeps_rebuilt_prefixes = True
        with pytest.raises(WeightsCorrupt, match="probe"):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]


@pytest.mark.parametrize(
    ("fault", "tensor_parallel", "is_healed"),
    [
        ("keeps_stale_copy", 2, True),
        ("keeps_prefixes", 1, True),
        ("keeps_stale_copy", 1, False),
        ("ignores_weights", 1, False),
    ],
)
async def test_state_that_only_a_fresh_server_loses_is_healed_by_one(
    tmp_path: Path, fault: Fault, tensor_parallel: int, is_healed: bool
) -> None:
    """Where that is what was found: the new version is served; elsewhere the old one is."""
    fake = FakeServer(stale="attn_sink")
    async with attached(fake, tmp_path, tensor_parallel=tensor_parallel, is_ours=True) as world:
        await world.activate(OLD)
        fake.started_from.clear()
        fake.faults = [fault]
        if is_healed:
            number, stored = await world.activate(NEW), NEW
            assert fake.started_from == [f"v{number:08d}"]
        else:
            with pytest.raises(WeightsCorrupt, match="probe"):
                await world.activate(NEW)
            number, stored = 0, OLD
            assert fake.started_from == []
        assert await world.sample() == [(number, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(stored, PROBE[0]), atol=1e-5)


async def test_a_prefix_of_whole_pages_is_looked_for(tmp_path: Path) -> None:
    """A server with large pages caches no short prompt: the witness is as long as it takes."""
    async with attached(FakeServer(page_size=16), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.faults = ["keeps_prefixes"]
        with pytest.raises(WeightsCorrupt, match="16 of 32 tokens cached under the version before"):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]


async def test_a_weight_whose_scale_came_in_a_call_of_its_own_is_refused(tmp_path: Path) -> None:
    """Two successes, and new codes are read with the old scale."""
    rescaled = dict(OLD)
    for name in [name for name in OLD if name.endswith("wo_a.scale")]:
        rescaled[name] = (OLD[name].view(torch.uint8) + 1).view(torch.float8_e8m0fnu)
    async with attached(FakeServer(stale="wo_a.scale"), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.faults = ["keeps_stale_copy"]
        with pytest.raises(WeightsCorrupt, match="probe"):
            await world.activate(rescaled)
        assert await world.sample() == [(old, 4)]


async def test_a_server_that_cannot_go_back_samples_nothing_until_it_has(tmp_path: Path) -> None:
    """Its label still is the old one; what it would sample with, nobody knows."""
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.faults = ["asserts", "asserts"]
        with pytest.raises(ServerFailed, match="is not ours to restart"):
            await world.activate(NEW)
        sampling = asyncio.create_task(world.sample())
        done, _ = await asyncio.wait({sampling}, timeout=0.2)
        assert not done
        assert not await world.versions.is_served()  # so that the guard recovers it
        world.fake.faults = ["asserts"]
        with pytest.raises(ServerRefused):
            await world.versions.recover()
        assert not sampling.done()
        await world.versions.recover()
        assert await world.versions.is_served()
        assert await sampling == [(old, 4)]


async def test_post_processing_that_does_nothing_is_refused(tmp_path: Path) -> None:
    async with attached(FakeServer(dialect="post_process"), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.faults = ["forgets_post_processing"]
        with pytest.raises(WeightsCorrupt, match="probe"):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]


async def test_an_attached_server_that_came_back_is_loaded_again(tmp_path: Path) -> None:
    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        world.fake.forget()
        await world.versions.recover()
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)


async def test_a_server_of_another_model_is_refused_at_the_start_and_when_it_comes_back(
    tmp_path: Path,
) -> None:
    fake = FakeServer()
    async with attached(fake, tmp_path) as world:
        await world.activate(OLD)
        spec, server = world.engine.spec, world.engine.server
        assert spec.server is not None
        await started(spec, spec.server, server, tmp_path)
        fake.architecture = "DeepseekV3ForCausalLM"
        with pytest.raises(ServerRefused, match=r"serves DeepseekV3ForCausalLM; Tandem\w+ is what"):
            await started(spec, spec.server, server, tmp_path)
        fake.forget()
        with pytest.raises(ServerRefused, match="serves DeepseekV3ForCausalLM"):
            await world.versions.recover()


async def test_a_server_that_came_back_as_another_is_asked_what_it_speaks(tmp_path: Path) -> None:
    """Upstream went, the fork came, of a version that nobody has seen."""
    fake = FakeServer()
    async with attached(fake, tmp_path) as world:
        old = await world.activate(OLD)
        fork = FakeServer(dialect="post_process", version="0.5.99")
        async with serving(fork):
            world.engine.server.client.url = fork.url
            with structlog.testing.capture_logs() as logs:
                await world.versions.recover()
            assert [one["found"] for one in logs if "untested" in one["event"]] == ["0.5.99"]
            assert await world.sample() == [(old, 4)]
            number = await world.activate(NEW)
            assert await world.sample() == [(number, 4)]
        assert "/post_process_weights" in fork.calls
