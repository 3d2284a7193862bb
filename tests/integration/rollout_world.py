"""What surrounds a rollout server: a job, published versions, and a trainer that serves shards.

The trainer's HTTP is a few lines on a socket, so that tests can cut it off in the middle of a
shard, flip a bit, or let it stall.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import xxhash
from redis.asyncio import Redis
from torch import Tensor

from shared import topology
from shared.messages import (
    JobAnnounced,
    PromptGroup,
    RolloutGroup,
    SamplingParams,
    WeightsAnnounced,
)
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import quantise_tensor, write_release
from shared.quant.policy import POLICIES
from shared.streams import announce, entries_of
from shared.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardEntry,
    TensorEntry,
    delta_file,
    shard_file,
)
from shared.weights.protocol import Probe, ProbeSequence
from tests.tiny_deepseek_v4 import DEMO, random_weights

JOB_ID = "test-0000"
TOKENIZER = Path("assets/tiny-dsv4")
DTYPES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int8": "I8",
    "torch.int64": "I64",
}


def canonical_weights(seed: int, arch: Architecture = DEMO) -> dict[str, Tensor]:
    """Random FP8 release tensors."""
    stored: dict[str, Tensor] = {}
    for name, values in random_weights(arch, seed=seed).items():
        stored |= quantise_tensor(name, values, policy=POLICIES["fp8"])
    return stored


def write_version(
    folder: Path, tensors: dict[str, Tensor], version: int, *, max_shard_bytes: int = 400_000
) -> Manifest:
    """Shards and manifest of one version, as a trainer exports them."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    entries: list[TensorEntry] = []
    shards: list[bytearray] = [bytearray()]
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if shards[-1] and len(shards[-1]) + len(raw) > max_shard_bytes:
            shards.append(bytearray())
        entries.append(
            TensorEntry(
                name=name,
                shape=list(tensor.shape),
                dtype=DTYPES[str(tensor.dtype)],  # type: ignore[arg-type]
                shard=len(shards) - 1,
                offset=len(shards[-1]),
                num_bytes=len(raw),
                checksum=xxhash.xxh3_128_hexdigest(raw),
            )
        )
        shards[-1] += raw
    for index, shard in enumerate(shards):
        (folder / shard_file(index)).write_bytes(shard)
    manifest = Manifest(
        job_id=JOB_ID,
        policy_version=version,
        shards=[
            ShardEntry(index=i, num_bytes=len(s), checksum=xxhash.xxh3_128_hexdigest(bytes(s)))
            for i, s in enumerate(shards)
        ],
        tensors=entries,
    )
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return manifest


@dataclass
class Trainer:
    """Serves `versions[v]`'s shards; `spoil(version, shard, body)` may change what is sent."""

    versions: dict[int, Path] = field(default_factory=dict)
    spoil: Callable[[int, int, bytes], bytes] = lambda version, shard, body: body
    cut_after: dict[int, int] = field(default_factory=dict)  # shard -> bytes, then hang up, once
    answering: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: it stalls
    requests: list[tuple[int, int, int]] = field(default_factory=list)  # version, shard, offset
    kinds: list[str] = field(default_factory=list)  # of the requests: shards, deltas
    url: str = ""

    def manifest(self, version: int) -> Manifest:
        return Manifest.model_validate_json((self.versions[version] / MANIFEST_FILE).read_bytes())

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, _, _, version, kind, shard = head.split()[1].split("/")
            offset = 0
            for line in head.splitlines():
                if line.lower().startswith("range: bytes="):
                    offset = int(line.split("=")[1].rstrip("-"))
            self.requests.append((int(version), int(shard), offset))
            self.kinds.append(kind)
            await self.answering.wait()
            name = shard_file(int(shard)) if kind == "shards" else delta_file(int(shard))
            body = (self.versions[int(version)] / name).read_bytes()
            body = self.spoil(int(version), int(shard), body)[offset:]
            status = "206 Partial Content" if offset else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            writer.write(body[: self.cut_after.pop(int(shard), len(body))])
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving_trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer()
    trainer.answering.set()
    server = await asyncio.start_server(trainer.answer, "127.0.0.1", 0)
    trainer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield trainer


def job_document(checkpoint: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "test",
        "steps": 4,
        "model": {"rollout_checkpoint": str(checkpoint)},
        "data": {"path": "/nowhere/rows.jsonl"},
        "sampling": {
            "groups_per_step": 4,
            "samples_per_prompt": 4,
            "context_length": 64,
            "max_response_tokens": 16,
        },
        "rollout": {"max_running_requests": 16},
        "update": {"deadline_s": 20.0},
    }
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields
    return document


def write_checkpoint(path: Path, arch: Architecture = DEMO) -> Path:
    write_release(
        path, arch.with_format("fp8"), random_weights(arch, seed=99), tokenizer_from=TOKENIZER
    )
    return path


def make_prompt(draw: int, **fields: Any) -> PromptGroup:
    values: dict[str, Any] = {
        "job_id": JOB_ID,
        "group_id": f"{JOB_ID}.g{draw:06d}",
        "draw": draw,
        "prompt_token_ids": [10 + draw, 20, 30 + draw, 40],
        "gold": "1",
        "grader": "arithmetic",
        "num_samples": 4,
        "sampling": SamplingParams(max_response_tokens=12, stop_token_ids=[1]),
        "seed": draw,
        "min_policy_version": 0,
    }
    return PromptGroup(**(values | fields))


@dataclass
class Server:
    """A real rollout process and what a trainer does with it."""

    process: asyncio.subprocess.Process
    name: str
    url: str
    http: httpx.AsyncClient

    async def get(self, path: str) -> Any:
        answer = await self.http.get(f"{self.url}{path}")
        return answer.json() if answer.content else None

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(f"{self.url}{path}", json=body)

    async def update(
        self, trainer: Trainer, version: int, *, mode: str = "in_place", probe: Any = None
    ) -> httpx.Response:
        """Drive a whole transaction; the answer of the commit."""
        begun = await self.begin(trainer, version)
        assert begun.status_code == 202, begun.text
        await eventually(lambda: self.is_in_state(version, "staged"), f"{version} staged")
        body = {"pause_mode": mode, "probe": probe}
        return await self.post(f"/v1/weights/updates/{version}/commit", body)

    async def begin(self, trainer: Trainer, version: int) -> httpx.Response:
        body = {
            "job_id": JOB_ID,
            "version": version,
            "manifest": trainer.manifest(version).model_dump(mode="json"),
            "sources": [trainer.url],
        }
        return await self.post("/v1/weights/updates", body)

    async def is_in_state(self, version: int, state: str) -> bool:
        return (await self.get(f"/v1/weights/updates/{version}"))["state"] == state

    async def has(self, **fields: Any) -> bool:
        info = await self.get("/v1/info")
        return all(info[key] == value for key, value in fields.items())


@contextlib.asynccontextmanager
async def rollout_process(
    redis_url: str, port: int, folder: Path, *, name: str = "rollout-0", **flags: str
) -> AsyncIterator[Server]:
    """`python -m services.rollout`, up and answering; ended on leaving."""
    argv = ["--port", str(port), "--redis-url", redis_url, "--replica", name]
    argv += ["--staging-dir", str(folder / "staging"), "--log.format", "json"]
    for key, value in flags.items():
        argv += [f"--{key.replace('_', '-')}", value]
    log = (folder / f"{name}.log").open("ab")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.rollout",
        *argv,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    )
    log.close()
    async with httpx.AsyncClient(timeout=30.0) as http:
        server = Server(process, name, f"http://127.0.0.1:{port}", http)

        async def answers() -> bool:
            assert process.returncode is None, (folder / f"{name}.log").read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return (await http.get(f"{server.url}/healthz")).status_code == 200
            return False

        try:
            await eventually(answers, f"{name} to answer")
            yield server
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def announce_job(redis: Redis, trainer: Trainer, document: dict[str, Any]) -> None:
    body = JobAnnounced(job_id=JOB_ID, state="active", trainer_url=trainer.url, job=document)
    await announce(redis, topology.JOB_CHANGES, body.pack(), current_key=topology.JOB_CURRENT)


async def announce_version(redis: Redis, trainer: Trainer, version: int) -> None:
    body = WeightsAnnounced(
        job_id=JOB_ID,
        policy_version=version,
        trainer_url=trainer.url,
        published_at_s=time.time(),
    )
    await redis.set(topology.weights_current(JOB_ID), body.pack())


async def published_groups(redis: Redis) -> list[RolloutGroup]:
    reply = await redis.xread({topology.rollouts(JOB_ID): b"0"})
    return [RolloutGroup.unpack(fields[b"body"]) for _, fields in entries_of(reply)]


async def eventually(
    holds: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.05)


def probe_of(sequences: list[list[int]], logprobs: list[list[float]], bound: float = 0.1) -> Any:
    """A probe that expects `logprobs`."""
    parts = [
        ProbeSequence(token_ids=ids, logprobs=scores)
        for ids, scores in zip(sequences, logprobs, strict=True)
    ]
    return json.loads(Probe(sequences=parts, max_mean_abs_delta=bound).model_dump_json())
