"""What a weight update costs, as ratios measured in one run.

`python -m benchmarks.weights [--gib 1.0] [--only NAME ...] [--out FILE]`. Staging: shards of one
version from a server's process into files of ours, checked, beside raw loopback TCP of the same
bytes, which one buffer of 1 MiB receives and nobody keeps.
Export: quantised, checksummed, written, beside one pass of plain torch. Update: a real engine child
that samples meanwhile, with a probe as a job's has it: how long no step is made, what running
completions cost after that, and how much memory it takes.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import xxhash
from rich.console import Console
from rich.table import Table
from torch import Tensor

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.engine import Engine, running_engine
from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.staging import Stager
from services.rollout.weights import Updates
from services.trainer.export import export_version
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import weight_shapes
from shared.quant.policy import POLICIES
from shared.weights.delta import encode_delta
from shared.weights.manifest import Manifest, ShardEntry, delta_file, shard_file
from shared.weights.protocol import (
    BeginUpdate,
    CommitResult,
    CommitUpdate,
    Probe,
    ProbeSequence,
)
from shared.weights.shard_server import Kind, ShardServer

JOB_ID = "benchmark"
SHARD_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
REPEATS = 3
STAGINGS = 5
PROBE_SEQUENCES = 4  # as many as a job has by default
PROBE_TOKENS = 128  # as many of each are compared at most
Row = tuple[str, str, str, str]  # what, measured, bound, details


def measure_staging(given: argparse.Namespace) -> list[Row]:
    """Medians of alternating runs: the machine's other work hits all three.

    A job's updates go over the files of the version before the last; only a server's first two
    versions make new ones.
    """
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        folder = Path(scratch) / "published"
        manifest = _random_version(folder, int(given.gib * 2**30))
        with _other_process(_serve_shards, folder) as port:
            raw, new, over = [], [], []
            with _other_process(_serve_raw, folder, len(manifest.shards)) as raw_port:
                for attempt in range(STAGINGS):
                    raw.append(_receive_raw(raw_port, manifest.num_bytes))
                    first, later = (Path(scratch) / f"{n}-{attempt}" for n in ("first", "later"))
                    new.append(_stage(manifest, port, first))
                    over.append(_stage(manifest, port, later, spare=first))
                    shutil.rmtree(later)
    plain = _Spent.median(raw)
    return [
        (
            f"HTTP staging, checked, {where}",
            f"{plain.seconds / found.seconds:.2f}",
            ">= 0.5",
            f"{found.told(manifest)} beside {plain.told(manifest)} of raw TCP",
        )
        for where, found in (
            ("over old files", _Spent.median(over)),
            ("into new files", _Spent.median(new)),
        )
    ]


@dataclass(frozen=True, slots=True)
class _Spent:
    """By whoever receives."""

    seconds: float
    cpu_s: float

    @classmethod
    def by(cls, run: Callable[[], None]) -> Self:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        run()
        return cls(time.perf_counter() - began_s, time.process_time() - cpu_s)

    @classmethod
    def median(cls, found: Iterable[Self]) -> Self:
        """Of each by itself."""
        seconds, cpu_s = zip(*((one.seconds, one.cpu_s) for one in found), strict=True)
        return cls(statistics.median(seconds), statistics.median(cpu_s))

    def told(self, manifest: Manifest) -> str:
        gigabytes = manifest.num_bytes / 1e9
        return f"{gigabytes / self.seconds:.2f} GB/s ({self.cpu_s / gigabytes:.2f} CPU s/GB)"


def _random_version(folder: Path, num_bytes: int) -> Manifest:
    folder.mkdir(parents=True)
    shards = []
    for index in range(max(1, num_bytes // SHARD_BYTES)):
        raw = np.random.default_rng(index).integers(0, 256, SHARD_BYTES, dtype=np.uint8)
        raw.tofile(folder / shard_file(index))
        checksum = xxhash.xxh3_128_hexdigest(raw.data)
        shards.append(ShardEntry(index=index, num_bytes=SHARD_BYTES, checksum=checksum))
    return Manifest(job_id=JOB_ID, policy_version=0, shards=shards, tensors=[])


def _stage(manifest: Manifest, port: int, target: Path, *, spare: Path | None = None) -> _Spent:
    target.mkdir()
    url = f"http://127.0.0.1:{port}"
    begin = BeginUpdate(job_id=JOB_ID, version=0, manifest=manifest, sources=[url])
    stager = Stager(begin, target, None, deadline_s=600.0, spare=spare)
    return _Spent.by(stager.bring_all)


def _serve_shards(folder: Path, told: Any) -> None:
    server = ShardServer(lambda version, kind, index: folder / shard_file(index))
    told.send(server.port)
    told.recv()
    server.close()


def _serve_raw(folder: Path, num_shards: int, told: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                for index in range(num_shards):
                    with (folder / shard_file(index)).open("rb") as file:
                        connection.sendfile(file)

    threading.Thread(target=serve, daemon=True).start()
    told.send(listener.getsockname()[1])
    told.recv()


def _receive_raw(port: int, num_bytes: int) -> _Spent:
    chunk = memoryview(bytearray(CHUNK_BYTES))

    def receive() -> None:
        left = num_bytes
        while left > 0 and (count := connection.recv_into(chunk)):
            left -= count

    with socket.create_connection(("127.0.0.1", port)) as connection:
        return _Spent.by(receive)


class _other_process:  # noqa: N801  used as a function
    """Runs `work(*arguments, pipe)` elsewhere; the first thing that it tells."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(*arguments, theirs), daemon=True)

    def __enter__(self) -> Any:
        self._process.start()
        return self._ours.recv()

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        self._process.join(10.0)


def measure_export(given: argparse.Namespace) -> list[Row]:
    """CPU time on matrices of the published model's order, in both cases from FP32 in memory."""
    arch = replace(
        wide_architecture(),
        hidden_size=2048,
        moe_intermediate_size=1024,
        num_hidden_layers=2,
        compress_ratios=(0, 4),
        n_routed_experts=4,
    )
    weights = random_weights(arch, seed=0)
    matrices = [one for one in weights.values() if one.dim() == 2 and one.is_floating_point()]
    plain = min(_cpu_s(lambda: [_plain_pass(one) for one in matrices]) for _ in range(REPEATS))
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        exports = []
        for attempt in range(REPEATS):
            folder = Path(scratch) / str(attempt)
            exports.append(_cpu_s(lambda to=folder: export(arch, weights, to)))  # type: ignore[misc]
    num_bytes = sum(one.numel() * one.element_size() for one in weights.values())
    details = (
        f"{num_bytes / min(exports) / 1e9:.2f} GB/s of FP32, {num_bytes / plain / 1e9:.2f} plain"
    )
    return [("export and quantise", f"{min(exports) / plain:.2f}", "<= 2", details)]


def _plain_pass(weight: Tensor) -> Tensor:
    """Scale by a block's largest value and cast: no checks, no files."""
    rows, columns = weight.shape
    if rows % 128 or columns % 128:
        return weight.to(torch.bfloat16)
    blocks = weight.view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn)


def measure_delta(given: argparse.Namespace) -> list[Row]:
    """Of random codes, 3 % of which are others."""
    generator = np.random.default_rng(0)
    base = generator.integers(0, 256, SHARD_BYTES, dtype=np.uint8)
    new = base.copy()
    at = np.flatnonzero(generator.random(SHARD_BYTES, dtype=np.float32) < 0.03)
    new[at] += generator.integers(1, 256, len(at), dtype=np.uint8)
    delta = encode_delta(base, new, item_bytes=1)
    assert delta is not None
    share = len(delta) / SHARD_BYTES
    return [("changes, 3 % of the codes", f"{share:.1%}", "<= 8 %", "of the bytes of all codes")]


def measure_update(given: argparse.Namespace) -> list[Row]:
    return asyncio.run(_measure_update(given))


async def _measure_update(given: argparse.Namespace) -> list[Row]:
    arch = wide_architecture()
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        root, base = Path(scratch), None
        weights = random_weights(arch, seed=0)
        for version in range(3):
            base = export(arch, weights, root / str(version), version=version, base=base)
            weights = {name: _moved(one, seed=version) for name, one in weights.items()}
        del weights
        source = ShardServer(lambda version, kind, index: _file(root, version, kind, index))
        spec = EngineSpec(arch, 16, context_length=256, quantise_activations=True, num_threads=1)
        probes = _probes(spec, root, versions=range(3))
        async with running_engine(spec) as engine:
            updates = Updates(
                engine,
                job_id=JOB_ID,
                folder=root / "staging",
                deadline_s=600.0,
                activation_limit_s=600.0,
                max_bytes=2**40,
                on_change=lambda: None,
            )
            empty = anonymous_bytes(engine.pid)
            found = [
                await _update(updates, engine, root, source, version, probe)
                for version, probe in enumerate(probes)
            ]
            await updates.close()
        await asyncio.to_thread(source.close)
    return _update_rows(found[1:], empty, found[0])


def _probes(spec: EngineSpec, root: Path, *, versions: Iterable[int]) -> list[Probe]:
    """What a trainer that rounds as the engine does expects of each version."""
    generator, engine = np.random.default_rng(0), EmbeddedEngine(spec)
    shape = (PROBE_SEQUENCES, PROBE_TOKENS)
    sequences = generator.integers(5, spec.arch.vocab_size, shape).tolist()
    probes = []
    for version in versions:
        engine.load(root / str(version), version)
        _, scores = engine.score(sequences, 1.0, version)
        expected = [
            ProbeSequence(token_ids=token_ids, logprobs=logprobs.tolist())
            for token_ids, logprobs in zip(sequences, scores, strict=True)
        ]
        probes.append(Probe(sequences=expected, max_mean_abs_delta=1e-3))
    return probes


async def _update(
    updates: Updates,
    engine: Engine,
    root: Path,
    source: ShardServer,
    version: int,
    probe: Probe,
) -> dict[str, float]:
    """One whole update while completions are sampled."""
    manifest = Manifest.model_validate_json((root / str(version) / "manifest.json").read_bytes())
    sampling = [asyncio.create_task(_sample(engine, n)) for n in range(8)] if version else []
    await asyncio.sleep(1.0 if version else 0.0)
    url = f"http://127.0.0.1:{source.port}"
    memory = _Memory(engine.pid)
    before = anonymous_bytes(engine.pid)
    began_s = time.perf_counter()
    begin = BeginUpdate(
        job_id=JOB_ID,
        version=version,
        base_version=engine.policy_version,
        manifest=manifest,
        sources=[url],
    )
    updates.begin(begin, known_sources=[url])
    while updates.status(version).state == "staging":  # noqa: ASYNC110  as a trainer polls
        await asyncio.sleep(0.01)
    status = updates.status(version)
    assert status.state == "staged", status.error
    result: CommitResult = await updates.commit(version, CommitUpdate(probe=probe))
    seconds = time.perf_counter() - began_s
    peak = memory.stop()
    await asyncio.gather(*sampling)
    return {
        "seconds": seconds,
        "pause_s": result.pause_s,
        "probe_s": result.probe_s,
        "resume_s": result.resume_s,
        "share_pulled": status.pulled_bytes / manifest.num_bytes,
        "before": before,
        "peak": peak,
        "after": anonymous_bytes(engine.pid),
    }


def _update_rows(found: list[dict[str, float]], empty: int, first: dict[str, float]) -> list[Row]:
    """The first version has nothing beside it; memory is compared with sampling under it alone."""
    slowest = max(found, key=lambda one: one["pause_s"] / one["seconds"])
    share = slowest["pause_s"] / slowest["seconds"]
    anew = max(one["resume_s"] / one["seconds"] for one in found)
    anew_s, probe_s = (
        " and ".join(f"{one[phase]:.1f}" for one in found) for phase in ("resume_s", "probe_s")
    )
    one_version = first["after"] - empty
    rest = found[0]["before"] - one_version  # of the process and of what it samples
    memory = max((one["peak"] - rest) / (2 * one_version) for one in found)
    pulled = ", ".join(f"{one['share_pulled']:.0%}" for one in found)
    return [
        (
            "pause: no step, with the prompt that proves it",
            f"{share:.2%}",
            "<= 10 %",
            f"of the update: {1e3 * slowest['pause_s']:.1f} ms of {slowest['seconds']:.2f} s",
        ),
        (
            f"probe of {PROBE_SEQUENCES} x {PROBE_TOKENS} tokens",
            f"{max(one['probe_s'] / one['seconds'] for one in found):.0%}",
            "",
            f"of the update, beside sampling: {probe_s} s",
        ),
        (
            "computing 16 running completions anew",
            f"{anew:.0%}",
            "",
            f"of the update, after it: {anew_s} s",
        ),
        (
            "memory of the engine",
            f"{memory:.2f}",
            "<= 1.1",
            f"peak / (old + new); one version takes {one_version / 1e6:.0f} MB",
        ),
        ("bytes pulled by the updates", pulled, "", "of a whole version"),
    ]


async def _sample(engine: Engine, number: int) -> None:
    request = GroupRequest(
        engine.new_request_id(),
        np.arange(5, 37, dtype=np.int32) + number,
        [0, 1],
        SamplingParams(max_response_tokens=64),
        number,
    )
    await engine.generate(request, timeout_s=600.0)


class _Memory:
    """The most anonymous memory that a process has while this runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._stopped.wait(0.005):
            self._peak = max(self._peak, anonymous_bytes(self._pid))


def anonymous_bytes(pid: int) -> int:
    """Memory that only this process has; mapped files can be read again."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no RssAnon")


def wide_architecture() -> Architecture:
    """The demo's model, large enough for bytes to matter: about 70 MB in FP8."""
    arch = Architecture.load(Path("assets/tiny-dsv4"))
    return replace(
        arch,
        hidden_size=512,
        num_hidden_layers=16,
        compress_ratios=arch.compress_ratios * 4,
        q_lora_rank=256,
        moe_intermediate_size=256,
        vocab_size=2048,
    )


def random_weights(arch: Architecture, *, seed: int) -> dict[str, Tensor]:
    return dict(_random_tensors(arch, torch.Generator().manual_seed(seed)))


def _random_tensors(arch: Architecture, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for name, shape in weight_shapes(arch).items():
        if name.endswith("tid2eid"):
            rows = [torch.randperm(arch.n_routed_experts, generator=generator) for _ in range(64)]
            table = torch.stack(rows)[:, : shape[1]].repeat(shape[0] // 64 + 1, 1)
            yield name, table[: shape[0]].contiguous()
        elif "norm" in name:
            yield name, torch.ones(shape)
        else:
            yield name, 0.03 * torch.randn(shape, generator=generator)


def _moved(values: Tensor, *, seed: int) -> Tensor:
    if not values.is_floating_point():
        return values
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    return values + 5e-5 * noise


def export(
    arch: Architecture,
    weights: dict[str, Tensor],
    folder: Path,
    *,
    version: int = 0,
    base: Path | None = None,
) -> Path:
    folder.mkdir()
    export_version(
        weights.items(),
        folder,
        job_id=JOB_ID,
        policy_version=version,
        policy=POLICIES[arch.weight_format],
        max_shard_bytes=SHARD_BYTES,
        base=base,
    )
    return folder


def _file(root: Path, version: int, kind: Kind, index: int) -> Path:
    name = shard_file(index) if kind == "shards" else delta_file(index)
    return root / str(version) / name


def _cpu_s(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


MEASURES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "staging": measure_staging,
    "export": measure_export,
    "delta": measure_delta,
    "update": measure_update,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of the version that is staged")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    scratch = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    parser.add_argument("--scratch", default=scratch, help="folder for the files")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.only for row in MEASURES[name](given)]
    table = Table("what", "measured", "bound", "", box=None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
