"""A server that answers success proves nothing: each known fault is refused, the old serves.

The server is attached to, so that going back happens through its own update calls.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.sglang import reach
from services.rollout.engine.sglang.__main__ import started
from services.rollout.engine.sglang.checkpoint import write_folder
from services.rollout.engine.sglang.client import ServerRefused, SGLangClient
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import identify
from services.rollout.engine.sglang.server import Server, ServerFailed
from services.rollout.engine.sglang.spec import Platform, ServerSpec, TransportName
from services.rollout.engine.sglang.transports import transport_of
from services.rollout.engine.sglang.versions import FIRST, Versions, config_of
from shared.errors import Retryable, WeightsCorrupt
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.protocol import CommitUpdate, Probe, ProbeSequence
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs, variant
from tests.integration.fake_sglang import FakeServer, Fault, serving
from tests.integration.rollout_world import write_version
from tests.integration.sglang_parts import install

OLD, NEW = variant(0), variant(1)


@dataclass
class Attached:
    """Our side of one server."""

    fake: FakeServer
    engine: SGLangEngine
    versions: Versions
    folder: Path
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def activate(
        self, stored: dict[str, Tensor], *, bound: float = 1e-3, noise: float = 0.0
    ) -> int:
        """The next version; `noise` is what the trainer's scores of it are off by."""
        number = next(self.numbers)
        staged = self.folder / f"staged-{number}"
        manifest = write_version(staged, stored, number)
        sequences = [
            ProbeSequence(token_ids=ids, logprobs=_with_noise(stored, ids, noise, seed=number))
            for ids in PROBE
        ]
        commit = CommitUpdate(probe=Probe(sequences=sequences, max_mean_abs_delta=bound))
        await self.versions.activate(manifest, staged, commit, asked_at_s=time.monotonic())
        return number

    async def sample(self, *, num_samples: int = 1) -> list[tuple[int, int]]:
        request = GroupRequest(
            f"request-{next(self.numbers)}",
            np.array(PROBE[0], np.int32),
            list(range(num_samples)),
            SamplingParams(max_response_tokens=4),
            seed=1,
        )
        return (await self.engine.generate(request))[0].version_spans


def _with_noise(stored: dict[str, Tensor], ids: list[int], noise: float, seed: int) -> list[float]:
    exact = reference_logprobs(stored, ids)
    drawn: list[float] = (
        exact + noise * np.random.default_rng(seed).normal(size=len(exact))
    ).tolist()
    return drawn


@contextlib.asynccontextmanager
async def attached(
    fake: FakeServer,
    folder: Path,
    *,
    deadline_s: float = 20.0,
    stream_interval: int = 0,
    tensor_parallel: int = 1,
    platform: Platform = "cpu",
    is_ours: bool = False,
    transport: TransportName = "disk",
) -> AsyncIterator[Attached]:
    async with serving(fake):
        spec = ServerSpec(
            str(CHECKPOINT),
            url=fake.url,
            update_deadline_s=deadline_s,
            stream_interval=stream_interval,
            tensor_parallel=tensor_parallel,
            platform=platform,
            transport=transport,
        )
        engine_spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=spec)
        server = (Ours if is_ours else Server)(engine_spec, spec, log_file=folder / "server.log")
        if isinstance(server, Ours):
            server.fake = fake
            write_folder(folder / FIRST, variant(0), {})
        try:
            await server.start(folder / FIRST)
            engine = SGLangEngine(engine_spec, server)
            (architecture,) = config_of(engine_spec, spec)["architectures"]
            served = await identify(server, architecture=architecture)
            assert served.dialect == fake.dialect
            sends = transport_of(transport)
            versions = Versions(engine, spec, folder=folder, served=served, transport=sends)
            yield Attached(fake, engine, versions, folder)
        finally:
            await server.stop()


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


@pytest.fixture
def sglang_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has what it needs of the package to hand tensors over."""
    install(monkeypatch)


@pytest.mark.usefixtures("sglang_parts")
@pytest.mark.parametrize("dialect", ["session", "post_process", "bare"])
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_tensors_reach_every_rank_in_each_dialect(
    transport: TransportName, dialect: str, tmp_path: Path
) -> None:
    """Two ranks: each takes a handle of its own, or is a member of the group."""
    fake = FakeServer(dialect=dialect, ranks=2)  # type: ignore[arg-type]
    async with attached(fake, tmp_path, transport=transport) as world:
        for stored in (OLD, NEW):
            number = await world.activate(stored)
            assert await world.sample() == [(number, 4)]
        assert "/update_weights_from_disk" not in fake.calls


@pytest.mark.usefixtures("sglang_parts")
async def test_a_server_elsewhere_meets_us_at_our_address_and_is_loaded_back_without_our_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_ends", lambda url: ("192.0.2.7", "192.0.2.8"))
    async with attached(FakeServer(), tmp_path, transport="gloo") as world:
        old = await world.activate(OLD)
        world.fake.faults = ["refuses"]
        with pytest.raises(WeightsCorrupt, match="partially updated"):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]
        world.fake.forget()
        await world.versions.recover()
        assert await world.sample() == [(old, 4)]
        assert {one.rpartition(":")[0] for one in world.fake.joined} == {"192.0.2.7"}
        assert "/update_weights_from_disk" not in world.fake.calls


async def test_memory_is_not_handed_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_ends", lambda url: ("192.0.2.7", "192.0.2.8"))
    with pytest.raises(ServerFailed, match="is on another host, which cannot map"):
        async with attached(FakeServer(), tmp_path, transport="tensor"):
            pass


def test_this_host_is_here_and_another_is_not() -> None:
    for url in ("http://127.0.0.1:9", "http://127.0.0.9:9", "http://localhost:9/"):
        assert reach.is_here(url)
    assert reach.own_address("http://127.0.0.1:9") == "127.0.0.1"


TENSOR_FAULTS: list[Fault] = [
    "ignores_weights",
    "keeps_stale_copy",
    "says_no",
    "refuses",
    "drops_connection",
    "garbles_tables",
    "asserts",
    "dies",
]


@pytest.mark.usefixtures("sglang_parts")
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_a_fault_of_handed_over_tensors_is_refused_and_the_old_version_serves(
    transport: TransportName, fault: Fault, tmp_path: Path
) -> None:
    async with attached(FakeServer(), tmp_path, transport=transport) as world:
        old = await world.activate(OLD)
        world.fake.faults = [fault]
        with pytest.raises(WeightsCorrupt):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)
        assert world.fake.session == "none"
        number = await world.activate(NEW)
        assert await world.sample() == [(number, 4)]


def stepped(stored: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """After `number` small steps in one direction; each moves log-probabilities by some 1e-3."""
    generator = torch.Generator().manual_seed(3)
    moved = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype in (torch.bfloat16, torch.float32) and tensor.dim() > 1:
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            moved[name] = (tensor.float() + 1e-3 * number * signs).to(tensor.dtype)
        elif name.endswith("attn_sink"):
            moved[name] = tensor + 0.02 * number
    return moved


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


class Ours(Server):
    """A fake one that counts as started, and started again, by us."""

    fake: FakeServer

    @property
    def is_ours(self) -> bool:
        return True

    async def _spawn(self, model: Path) -> None:
        self.fake.start_from(model)
        self.client = SGLangClient(self.fake.url)


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


@pytest.mark.parametrize("asked", [None, 0])
async def test_a_score_that_an_update_cuts_short_is_of_one_version(
    tmp_path: Path, asked: int | None
) -> None:
    """The update waits for the call; then the new version is scored, or the lost one refused."""
    async with attached(FakeServer(), tmp_path) as world:
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
        assert await world.engine.server.is_well()
        assert world.fake.calls.count("/health_generate") == 2


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
                await asyncio.wait_for(world.engine.generate(wrong), 5)
            assert await asyncio.wait_for(world.sample(), 5) == [(number, 4)]
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
        assert await world.engine.server.client.is_well(timeout_s=2)
        await world.engine.abort("many")
        assert len(await asyncio.wait_for(running, 20)) == many
