"""A preflight with a real actor and a real engine behind HTTP: what passes, what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from torch import Tensor

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.models.deepseek_v4 import Sampler
from services.trainer.books import Books
from services.trainer.engine.actor import Actor
from services.trainer.preflight import devices as devices_of_host
from services.trainer.preflight.check import Preflight
from services.trainer.preflight.devices import Devices
from services.trainer.preflight.findings import PreflightRefused
from services.trainer.preflight.memory import plan_memory
from services.trainer.report.proofs import preflight_sentence
from shared.errors import PartialModel
from shared.frames import error_fields, error_from
from shared.http import HttpClient
from shared.job import Job
from shared.messages import SamplingParams
from shared.models.deepseek_v4.checkpoint import write_release
from shared.parity.trace import MEDIA_TYPE, Traced, TraceRequest
from shared.quant.activation import RELEASE
from shared.weights.protocol import Probe
from tests.parity.engines import Case
from tests.parity.live_sides import SamplerSide, TrainerSide, job_of
from tests.parity.mutations import MUTATIONS
from tests.tiny_deepseek_v4 import SMALL, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

ARCH = SMALL.with_format("fp8")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [300, 301, 302, 303, 304]]
GIB = 2**30


@dataclass
class Ranks:
    """The actor, asked as the keeper asks its ranks."""

    side: TrainerSide

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float, rounding: Any = "own"
    ) -> list[list[float]]:
        arrays = [np.array(ids) for ids in sequences]
        rows = self.side.actor.score(arrays, temperature=temperature, rounding=rounding)
        return [row.tolist() for row in rows]

    async def trace(self, request: bytes) -> bytes:
        states = self.side.actor.trace(TraceRequest.unpack(request))
        return Traced(policy_version=0, states=states).pack()


@dataclass
class Publisher:
    """Has brought `servers` to the version that is asked for."""

    servers: dict[str, str]
    probing: bool = True

    async def publish(self, version: int) -> None:
        assert not self.probing

    async def wait_served(self, version: int, *, deadline_s: float) -> bool:
        return bool(self.servers)

    async def wait_settled(self, version: int, *, grace_s: float) -> None:
        return None

    def probe(self, version: int) -> Probe | None:
        return None

    def addresses(self, version: int) -> dict[str, str]:
        return self.servers

    def describe(self) -> dict[str, str]:
        return dict.fromkeys(self.servers, "serving 0")


@dataclass
class Record:
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Servers:
    """Rollout servers by host; each has an engine."""

    def __init__(self, **engines: SamplerSide) -> None:
        self.engines = engines
        self.version = 0  # that they serve
        self.refusals = 0  # requests that are answered with 503 first
        self.rehearsed: str | None = None  # what a dry update comes to, if not to the same
        self.spoil: Callable[[list[Any]], object] | None = None  # the results of a completion
        self.only_logprobs = False  # as an engine that shows no states and rehearses nothing

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://{name}" for name in self.engines}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.refusals:
            self.refusals -= 1
            return httpx.Response(503)
        if self.only_logprobs and request.url.path != "/v1/generate":
            return httpx.Response(501)
        side = self.engines[request.url.host]
        if request.url.path == "/v1/trace":
            asked_for = TraceRequest.unpack(request.content)
            if asked_for.policy_version not in (None, self.version):
                return httpx.Response(409)
            traced = await side(asked_for.model_copy(update={"policy_version": None}))
            return httpx.Response(200, content=traced.pack(), headers={"content-type": MEDIA_TYPE})
        version = side.engine.scheduler.version
        assert version is not None
        if request.url.path == "/v1/info":
            return httpx.Response(200, json={"effective_checksum": version.checksum})
        if request.url.path.endswith(f"/{self.version}/rehearse"):
            checksum = self.rehearsed or version.checksum
            phases = dict.fromkeys(("pause_s", "load_s", "restore_s", "probe_s", "resume_s"), 0.0)
            return httpx.Response(
                200,
                json={"version": self.version, "effective_checksum": checksum, **phases},
            )
        assert request.url.path == "/v1/generate"
        asked = json.loads(request.content)
        results = [_completed(side, j, asked) for j in range(len(asked["prompts"]))]
        if self.spoil is not None:
            self.spoil(results)
        return httpx.Response(200, json={"policy_version": self.version, "results": results})


def _completed(side: SamplerSide, prompt: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    scheduler = side.engine.scheduler
    scheduler.add(
        GroupRequest(
            request_id="r",
            prompt_token_ids=np.array(asked["prompts"][prompt]["token_ids"], np.int32),
            samples=list(range(asked["num_samples"])),
            sampling=SamplingParams(**asked["sampling"]),
            seed=asked["seed"],
            prompt_index=prompt,
        )
    )
    while not (done := scheduler.step()):
        pass
    return [
        {"token_ids": one.token_ids.tolist(), "logprobs": one.logprobs.tolist()}
        for one in done[0][1]
    ]


@dataclass
class World:
    job: Job
    release: Path
    actor: Actor
    books: Books
    record: Record

    def preflight(
        self,
        servers: Servers,
        *,
        job: Job | None = None,
        free: int = 8 * GIB,
        devices: Devices | None = None,
    ) -> Any:
        async def find_devices() -> Devices | None:
            return devices

        http = HttpClient(attempts=1, transport=httpx.MockTransport(servers.answer))
        return Preflight(
            job=job or self.job,
            checkpoint=self.release,
            books=self.books,
            record=self.record,  # type: ignore[arg-type]
            events=lambda name, **fields: {"name": name, **fields},  # type: ignore[arg-type]
            publisher=Publisher(servers.urls),  # type: ignore[arg-type]
            ranks=Ranks(TrainerSide(self.actor)),
            http=http,
            prompts=PROMPTS,
            settle_grace_s=0.0,
            available_bytes=lambda: free,
            find_devices=find_devices,
        )


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(ARCH, seed=11)


@pytest.fixture(scope="module")
def policy(
    weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory, megatron: None
) -> tuple[Path, Job, Actor]:
    release = tmp_path_factory.mktemp("policy") / "release"
    write_release(release, ARCH, weights)
    job = job_of(release)
    job = job.model_copy(update={"bounds": job.bounds.model_copy()})
    return release, job, Actor(job)


@pytest.fixture
def world(policy: tuple[Path, Job, Actor], tmp_path: Path) -> World:
    release, job, actor = policy
    return World(job, release, actor, Books(tmp_path / "books.sqlite"), Record())


async def test_honest_servers_pass_once(world: World, weights: dict[str, Tensor]) -> None:
    servers = Servers(one=SamplerSide.of(ARCH, weights), two=SamplerSide.of(ARCH, weights))
    servers.version = 5  # after five supervised steps, which nobody was served
    preflight = world.preflight(servers)
    await preflight.check_memory()
    await preflight.run(5)
    (event,) = world.record.events
    assert (event["name"], event["passed"], event["problems"]) == ("preflight_finished", True, [])
    assert [found["server"] for found in event["parity"]] == ["one", "two"]
    assert all(found["departs_at"] is None for found in event["parity"])
    # Rounding alike a flipped code may be left; as this actor trains, rounding is all there.
    assert event["parity"][0]["alike_mean"] < 0.02 < event["parity"][0]["own_mean"]
    assert event["memory"]["needed"] > 2**20
    assert [found["is_same"] for found in event["dry_updates"]] == [True, True]
    again = world.preflight(Servers())
    await again.check_memory()
    await again.run(5)
    assert len(world.record.events) == 1


@pytest.mark.parametrize(
    ("mistake", "beside"),
    [
        ("C not transposed", []),  # planted in a function, which every engine here shares
        ("sink zero", ["one"]),
        ("gate bias ignored", ["one"]),
        ("APE zero in C128", ["one"]),
    ],
)
async def test_planted_mistake_in_one_server_is_refused_by_name(
    mistake: str, beside: list[str], world: World, weights: dict[str, Tensor]
) -> None:
    mutation = MUTATIONS[mistake]
    honest = {name: SamplerSide.of(ARCH, weights) for name in beside}
    with mutation.planted("sampler", Case(ARCH, weights, Tensor(), Tensor())) as (arch, wrong):
        servers = Servers(**honest, two=SamplerSide.of(arch, wrong))
        with pytest.raises(PreflightRefused, match=f"^two: {mutation.at} departs by"):
            await world.preflight(servers).run(0)
    (event,) = world.record.events
    assert not event["passed"]
    assert [found["departs_at"] for found in event["parity"]][-1] == mutation.at
    assert event["seconds"] < 60


async def test_engine_of_log_probabilities_alone_is_compared_and_says_what_is_not(
    world: World, weights: dict[str, Tensor]
) -> None:
    rollout = world.job.rollout.model_copy(update={"engine": "sglang"})
    bounds = world.job.bounds.model_copy(update={"max_mean_abs_delta_logprob": 0.1})
    job = world.job.model_copy(update={"rollout": rollout, "bounds": bounds})
    with MUTATIONS["sink zero"].planted("sampler", Case(ARCH, weights, Tensor(), Tensor())) as (
        arch,
        wrong,
    ):
        servers = Servers(one=SamplerSide.of(arch, wrong))
        servers.only_logprobs = True
        with pytest.raises(PreflightRefused, match=r"^one: .* 0\.1 \(no sub-module could be named"):
            await world.preflight(servers, job=job).run(0)
    servers = Servers(one=SamplerSide.of(ARCH, weights))
    servers.only_logprobs = True
    await world.preflight(servers, job=job).run(0)
    event = world.record.events[-1]
    assert (event["passed"], event["dry_updates"]) == (True, [])
    assert event["untold"] == [
        "one makes no dry update: sglang cannot rehearse one",
        "one is compared by log-probabilities alone: no layer walk between sglang and these ranks",
    ]
    assert "Not shown: one makes no dry update" in preflight_sentence(event)


SPOILT: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "a result too few": (lambda r: r.pop(), "2 results of 3 prompts"),
    "a result too many": (lambda r: r.append(r[0]), "4 results of 3 prompts"),
    "a sample too few": (lambda r: r[1].pop(), "prompt 1 has 1 samples, not 2"),
    "a log-probability too few": (
        lambda r: r[2][0]["logprobs"].pop(),
        r"prompt 2 has \d+ log-probabilities of \d+ tokens",
    ),
    "a log-probability too many": (
        lambda r: r[0][1]["logprobs"].append(-1.0),
        r"prompt 0 has \d+ log-probabilities of \d+ tokens",
    ),
    "no token of the vocabulary": (
        lambda r: r[0][0]["token_ids"].__setitem__(0, 10**6),
        "the ranks cannot score what it sampled: .*1000000",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
async def test_answer_that_cannot_be_compared_is_refused_by_name(
    case: str, world: World, weights: dict[str, Tensor]
) -> None:
    spoil, message = SPOILT[case]
    servers = Servers(one=SamplerSide.of(ARCH, weights))
    servers.spoil = spoil
    with pytest.raises(PreflightRefused, match=rf"^one cannot be compared: .*{message}"):
        await world.preflight(servers).run(0)


@pytest.mark.parametrize("error", [PartialModel("on 2 ranks"), ValueError("the states exceed")])
async def test_only_ranks_with_a_part_of_the_model_are_not_walked(
    error: ValueError,
    world: World,
    weights: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(ranks: Ranks, request: bytes) -> bytes:
        raise error_from(error_fields(error))  # as it comes from another process

    monkeypatch.setattr(Ranks, "trace", refuse)
    preflight = world.preflight(Servers(one=SamplerSide.of(ARCH, weights)))
    if isinstance(error, PartialModel):
        await preflight.run(0)
        assert "no layer walk" in world.record.events[0]["untold"][0]
    else:
        with pytest.raises(PreflightRefused, match=r"^one cannot be compared: .*states exceed"):
            await preflight.run(0)


async def test_server_that_went_away_is_asked_again(
    world: World, weights: dict[str, Tensor]
) -> None:
    servers = Servers(one=SamplerSide.of(ARCH, weights))
    servers.refusals = 1
    await world.preflight(servers).run(0)
    assert [found["server"] for found in world.record.events[0]["parity"]] == ["one"]


async def test_dry_update_that_comes_to_other_weights_is_refused(
    world: World, weights: dict[str, Tensor]
) -> None:
    servers = Servers(one=SamplerSide.of(ARCH, weights))
    servers.rehearsed = "0" * 32
    with pytest.raises(PreflightRefused, match="one: a dry update of version 0 came to another"):
        await world.preflight(servers).run(0)


async def test_memory_beyond_the_machine_is_refused_before_anything_starts(world: World) -> None:
    with pytest.raises(PreflightRefused, match=r"memory: 0\.\d+ GB are needed \(ranks: weights"):
        await world.preflight(Servers(), free=2**20).check_memory()
    assert world.record.events[0]["problems"]


async def test_memory_beyond_the_accelerators_is_refused(world: World) -> None:
    """The host has room for all of it; that is not where the ranks' memory is."""
    small, large = Devices(2 * GIB), Devices(80 * GIB)
    with pytest.raises(PreflightRefused, match=r"memory: 4\.\d+ GB are needed \(rank: weights"):
        await world.preflight(Servers(), free=500 * GIB, devices=small).check_memory()
    refused = world.record.events[0]["memory"]
    assert refused["available"] == 2 * GIB
    assert "2.15 GB are available" in world.record.events[0]["problems"][0]
    await world.preflight(Servers(), free=1, devices=large).check_memory()
    assert len(world.record.events) == 1


async def test_accelerators_that_nobody_knows_are_told_of(
    world: World, weights: dict[str, Tensor]
) -> None:
    servers = Servers(one=SamplerSide.of(ARCH, weights))
    preflight = world.preflight(servers, devices=Devices(None))
    await preflight.check_memory()
    await preflight.run(0)
    (event,) = world.record.events
    assert (event["passed"], event["memory"]["available"]) == (True, None)
    assert event["untold"][0].startswith("the memory plan is compared with nothing")
    assert "memory of samplers" in event["untold"][1]


async def test_the_emptiest_accelerator_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_of_host, "NODES", (tmp_path / "none",))
    assert await devices_of_host.find_devices() is None
    monkeypatch.setattr(devices_of_host, "NODES", (tmp_path,))
    monkeypatch.setattr(devices_of_host, "AMD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await devices_of_host.find_devices() == Devices(None)  # no tool tells
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 1024; echo '[N/A]'; echo 143000\n")
    tool.chmod(0o755)
    assert await devices_of_host.find_devices() == Devices(143000 * 2**20)
    for card, used in (("card0", 60), ("card1", 10)):
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        (folder / "mem_info_vram_total").write_text("100\n")
        (folder / "mem_info_vram_used").write_text(f"{used}\n")
    assert await devices_of_host.find_devices() == Devices(90)


def test_the_engines_caches_take_what_is_planned(world: World) -> None:
    """The one that completions lie in, and the one that a new version is probed in."""
    limits = Limits(world.job.rollout.max_running_requests, world.job.sampling.context_length)
    scheduler = Scheduler(Sampler(ARCH, RELEASE), limits=limits)
    taken = scheduler.cache_bytes + scheduler.prober().cache_bytes
    planned = plan_memory(world.job, ARCH, available_bytes=GIB).parts["engine: cache"]
    assert planned == pytest.approx(taken, rel=0.01)


def test_memory_plan_grows_with_what_is_asked_for(world: World) -> None:
    plan = plan_memory(world.job, ARCH, available_bytes=GIB)
    rollout = world.job.rollout.model_copy(update={"max_running_requests": 256})
    more = plan_memory(world.job.model_copy(update={"rollout": rollout}), ARCH, available_bytes=GIB)
    assert plan.needed == sum(plan.parts.values())
    assert more.parts["engine: cache"] > 1.5 * plan.parts["engine: cache"]
    assert plan.parts["ranks: weights"] >= 4 * world.actor.num_parameters
