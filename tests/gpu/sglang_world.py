"""Two real SGLang servers, on one GPU unless placed apart, each the other's oracle: fresh loads.

    first:  starts with A, gets its updates from disk        fresh scores of A
    second: starts with B, gets its updates by CUDA IPC      fresh scores of B

At tensor parallel 1 a server must come back to a fresh load's scores and checksums exactly.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.__main__ import started
from services.rollout.engine.sglang.client import ServerRefused
from services.rollout.engine.sglang.dialects import dialect_of, loading
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.identity import Served
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import Kernels, ServerSpec, TransportName
from services.rollout.engine.sglang.transports import Disk, Transport, transport_of
from services.rollout.engine.sglang.versions import FIRST, Versions
from shared.http import HttpClient
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import load_release
from shared.weights.manifest import Manifest
from shared.weights.protocol import CommitUpdate, Probe, ProbeSequence
from tests.gpu.releases import SINGLE, releases
from tests.integration.rollout_world import write_version

RELEASES = "GPU_RELEASES"  # a folder that may have releases A and B already
CONTEXT = 8185  # what the server adds makes it 8192
BOUND = 0.02  # mean |delta log p| of the probes: far below what A and B differ by
LOAD_S = 60.0
_generator = np.random.default_rng(0)
TEXTS = [_generator.integers(2, SINGLE.vocab_size, n).tolist() for n in (300, 600, 2600)]
"""The longest has more compressed entries than the indexer picks, and the last token."""
DECODED = range(40, 300, 8)  # lengths of the prompts behind which a token is decoded

# Several servers and an actor share the GPU: a fraction is of what is free when a server starts.
# Chunks of 2048 tokens: more would compile further mixing kernels.
_ARGUMENTS = (
    *("--mem-fraction-static", "0.85", "--chunked-prefill-size", "2048"),
    *("--cuda-graph-max-bs", "32"),
)


@dataclass
class Staged:
    """A version's tensors as a trainer publishes them."""

    manifest: Manifest
    folder: Path

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.manifest.shards)


def stage(release: Path, folder: Path) -> Staged:
    manifest = write_version(folder, load_release(release), 0, max_shard_bytes=2**30)
    return Staged(manifest, folder)


@dataclass(frozen=True)
class Place:
    """Where a server runs, and how weights reach it."""

    transport: TransportName
    gpu: int = 0  # the first of its ranks'
    tensor_parallel: int = 1
    is_plain: bool = False  # SGLang's own class of model at any number of ranks

    @property
    def told_ranks(self) -> int:
        """What the launcher knows of: for a single rank it leaves SGLang's class alone."""
        return 1 if self.is_plain else self.tensor_parallel

    @property
    def arguments(self) -> tuple[str, ...]:
        """Ranks talk over NCCL alone: the other ways compile kernels at every start."""
        apart = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
        return (
            *_ARGUMENTS,
            *("--base-gpu-id", str(self.gpu)),
            *(apart if self.tensor_parallel > 1 else ()),
            # The last one said counts.
            *(("--tensor-parallel-size", str(self.tensor_parallel)) if self.is_plain else ()),
        )


@dataclass
class Driven:
    """One server, as the engine drives it."""

    versions: Versions
    transport: TransportName
    start_s: float
    first: Path  # the folder that it was started from
    refusal: str = ""  # of a server of SGLang's own class, which is driven all the same
    fresh: list[np.ndarray] = field(default_factory=list)  # scores of TEXTS before any update
    fresh_checksums: dict[str, str] = field(default_factory=dict)

    async def scores(self) -> list[np.ndarray]:
        """Of TEXTS, one by one and without cached prefixes."""
        found = []
        for text in TEXTS:
            await self.versions.engine.server.client.flush()
            found += await self.versions.engine.score_now([text])
        return found

    async def decoded(self) -> np.ndarray:
        """Log-probabilities of one token each, sampled behind its prompt's first in a decoding
        step, as a CUDA graph has it; greedy, one by one and without cached prefixes."""
        client, found = self.versions.engine.server.client, []
        asked = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        for length in DECODED:
            await client.flush()
            body = {"input_ids": [TEXTS[0][:length]], "sampling_params": [asked]}
            (answer,) = await client.generate(body | {"return_logprob": True}, timeout_s=60.0)
            found.append(answer["meta_info"]["output_token_logprobs"][1][0])
        return np.array(found, np.float32)

    async def checksums(self) -> dict[str, str]:
        """By parameter, of what the server holds on its device."""
        http = HttpClient(attempts=1)
        try:
            url = self.versions.engine.server.client.url
            return _checksums(await http.get(f"{url}/weights_checker", timeout_s=60.0))
        finally:
            await http.close()

    async def load(self, folder: Path, transport: Transport) -> float:
        """Another folder's tensors, outside of any transaction; the seconds of sending them."""
        client = self.versions.engine.server.client
        dialect = dialect_of(await client.endpoints())
        began_s = time.monotonic()
        async with loading(client, dialect, is_disk=isinstance(transport, Disk), timeout_s=LOAD_S):
            await transport.send(client, folder, timeout_s=LOAD_S)
        return time.monotonic() - began_s

    async def activate(
        self, staged: Staged, number: int, *, probed_as: list[np.ndarray], bound: float = BOUND
    ) -> dict[str, Any]:
        """The whole transaction; its probe is a fresh load's scores of the two short texts."""
        sequences = [
            ProbeSequence(token_ids=text, logprobs=logprobs.tolist())
            for text, logprobs in zip(TEXTS[:2], probed_as[:2], strict=True)
        ]
        commit = CommitUpdate(probe=Probe(sequences=sequences, max_mean_abs_delta=bound))
        manifest = staged.manifest.model_copy(update={"policy_version": number})
        began_s = time.monotonic()
        result = await self.versions.activate(manifest, staged.folder, commit, asked_at_s=began_s)
        seconds = {key: round(value, 3) for key, value in result.items() if key.endswith("_s")}
        return {
            "seconds": seconds,
            "gb": round(staged.num_bytes / 1e9, 3),
            "gb_per_s_of_restore": round(staged.num_bytes / 1e9 / seconds["restore_s"], 2),
            "probe_mean_abs_delta": result["probe_mean_abs_delta"],
        }


@dataclass
class World:
    arch: Architecture
    staged: dict[str, Staged]
    first: Driven
    second: Driven

    def fresh(self, name: str) -> tuple[list[np.ndarray], dict[str, str]]:
        """What a fresh load of a version scores, and its checksums."""
        driven = self.first if name == "A" else self.second
        return driven.fresh, driven.fresh_checksums


@asynccontextmanager
async def running(
    folder: Path, first_at: Place = Place("disk"), second_at: Place = Place("tensor")
) -> AsyncIterator[World]:
    """Both servers up, with their fresh scores; ended when this is left."""
    paths = await asyncio.to_thread(releases, Path(os.environ.get(RELEASES, folder)))
    async with (
        _server(paths["A"], folder / "a", first_at) as first,
        _server(paths["B"], folder / "b", second_at) as second,
    ):
        *staged, one, other = await asyncio.gather(
            *(asyncio.to_thread(stage, paths[n], folder / f"staged-{n}") for n in paths),
            first.begin(),
            second.begin(),
        )
        await _learn_fresh(one)
        await _learn_fresh(other)
        yield World(SINGLE, dict(zip(paths, staged, strict=True)), one, other)


@dataclass
class _Beginning:
    """A server that is about to be started."""

    spec: EngineSpec
    server: Server
    folder: Path
    is_plain: bool = False

    async def begin(self) -> Driven:
        """ServerRefused as every start does it; a plain one's is kept."""
        assert self.spec.server is not None
        began_s, refusal = time.monotonic(), ""
        try:
            versions = await started(self.spec, self.spec.server, self.server, self.folder)
        except ServerRefused as err:
            if not self.is_plain:
                raise
            versions, refusal = await self._all_the_same(self.spec.server), str(err)
        start_s = round(time.monotonic() - began_s, 1)
        first = self.folder / FIRST
        return Driven(versions, self.spec.server.transport, start_s, first, refusal)

    async def _all_the_same(self, spec: ServerSpec) -> Versions:
        engine = SGLangEngine(self.spec, self.server)
        served = Served(dialect_of(await self.server.client.endpoints()))
        transport = transport_of(spec.transport)
        return Versions(engine, spec, folder=self.folder, served=served, transport=transport)


@asynccontextmanager
async def _server(release: Path, folder: Path, place: Place) -> AsyncIterator[_Beginning]:
    await asyncio.to_thread(folder.mkdir)
    spec = ServerSpec(
        str(release),
        platform="cuda",
        kernels=Kernels(mhc_prenorm="deep_gemm"),
        transport=place.transport,
        tensor_parallel=place.told_ranks,
        max_total_tokens=400_000,
        log_file=str(folder / "server.log"),
        extra_arguments=place.arguments,
    )
    engine = EngineSpec(SINGLE, 64, CONTEXT, True, 8, record_experts=True, server=spec)
    server = Server(engine, spec, log_file=folder / "server.log")
    try:
        yield _Beginning(engine, server, folder, place.is_plain)
    finally:
        await server.stop()


async def _learn_fresh(driven: Driven) -> None:
    driven.fresh = await driven.scores()
    driven.fresh_checksums = await driven.checksums()


def _checksums(answer: Any) -> dict[str, str]:
    """The first map named `checksums`, however deep: its place differs between releases."""
    if isinstance(answer, dict):
        if isinstance(answer.get("checksums"), dict):
            return dict(answer["checksums"])
        answer = list(answer.values())
    for value in answer if isinstance(answer, list) else []:
        if found := _checksums(value):
            return found
    return {}
