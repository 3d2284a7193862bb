"""Our side of a server that answers like SGLang, attached to or as if started by us."""

import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.sglang.checkpoint import write_folder
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import identify
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import Platform, ServerSpec, TransportName
from services.rollout.engine.sglang.transports import transport_of
from services.rollout.engine.sglang.versions import FIRST, Versions, config_of
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.protocol import CommitUpdate, Probe, ProbeSequence
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs, variant
from tests.integration.fake_sglang import FakeServer, serving
from tests.integration.rollout_world import write_version

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
    deadline_s: float = 60.0,
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


class Ours(Server):
    """A fake one that counts as started, and started again, by us."""

    fake: FakeServer

    @property
    def is_ours(self) -> bool:
        return True

    async def _spawn(self, model: Path) -> None:
        self.fake.start_from(model)
        self.client = SGLangClient(self.fake.url)
