"""The rank process as the conductor starts it: torchrun, channel, steps, exports, checkpoints."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from shared.channel import AsyncChannel, listening
from shared.errors import ChannelClosed, Rejected, RemoteError
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.checkpoint import dequantise_tensor, load_release, write_release
from shared.models.deepseek_v4.reference import Reference
from shared.parity.trace import Traced, TraceRequest
from shared.process import die_with_parent, free_port, prepare_to_fork
from shared.quant.policy import is_scale, scale_name
from shared.weights.manifest import MANIFEST_FILE, Manifest, shard_file
from tests.tiny_deepseek_v4 import DEMO, random_weights

pytestmark = pytest.mark.timeout(180)

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "release"
    write_release(path, DEMO.with_format("fp8"), random_weights(DEMO, seed=3, spread=0.5))
    return path


def job(release: Path, **actor: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "steps": 3,
        "model": {"rollout_checkpoint": str(release)},
        "data": {"path": "unused.jsonl"},
        "sampling": {"context_length": 64, "max_response_tokens": 24},
        "update": {"max_shard_bytes": 2**20},
        "bounds": {"max_mean_abs_delta_logprob": 10.0},
        "actor": {
            "dtype": "float32",
            "max_tokens_per_gpu": 512,
            "optimizer": {"learning_rate": 1e-3},
            **actor,
        },
    }


@asynccontextmanager
async def ranks(log: Path, num_ranks: int = 1) -> AsyncIterator[tuple[AsyncChannel, Any]]:
    """torchrun with `num_ranks` ranks, connected; nothing of it is left afterwards."""
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--max-restarts", "0", "-m", "services.trainer.learner"),
    ]
    prepare_to_fork()
    async with listening() as listener:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                "--channel",
                listener.address,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        try:
            yield await listener.accept(60), process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def initialised(
    release: Path, log: Path, *, num_ranks: int = 1, **actor: Any
) -> AsyncIterator[AsyncChannel]:
    async with ranks(log, num_ranks) as (channel, _):
        document = {**job(release, **actor), "cluster": {"gpus_per_node": num_ranks}}
        first = {"job_id": "test-0000", "job": document}
        answer = await channel.request("init", first, timeout_s=60)
        assert answer["step"] == answer["policy_version"] == 0
        yield channel
        await channel.request("stop", timeout_s=20)


def batch(step: int, *, num_samples: int = 12, **changes: Any) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = []
    for index in range(num_samples):
        prompt, response = int(rng.integers(4, 12)), int(rng.integers(1, 24))
        sample = {
            "rollout_id": f"g{index // 4}.{index % 4}",
            "group_id": f"g{index // 4}",
            "token_ids": rng.integers(0, DEMO.vocab_size, prompt + response),
            "num_prompt_tokens": prompt,
            "sampler_logprobs": np.full(response, -5.5, np.float32),
            "advantage": float(rng.normal()),
            "reward": 1.0,
            "oldest_version": step - 1,
        }
        samples.append(TrainingSample(**(sample | changes)))
    return TrainingBatch(
        job_id="test-0000",
        step=step,
        policy_version=step - 1,
        temperature=1.0,
        samples=samples,
        group_ids=["g0", "g1", "g2"],
    )


async def train(channel: AsyncChannel, step: int, **changes: Any) -> dict[str, Any]:
    body = batch(step, **changes).pack()
    return await channel.request("train_step", {"batch": body}, timeout_s=60)


async def exported(channel: AsyncChannel, path: Path, version: int) -> dict[str, torch.Tensor]:
    """Export, check every checksum, and read the tensors back by release name."""
    what = {"policy_version": version, "path": str(path)}
    await asyncio.to_thread(path.mkdir)
    answer = await channel.request("export", what, timeout_s=60)
    return read_version(path, version, answer)


def read_version(path: Path, version: int, answer: dict[str, Any]) -> dict[str, torch.Tensor]:
    manifest = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
    assert (manifest.job_id, manifest.policy_version) == ("test-0000", version)
    assert answer["bytes"] == manifest.num_bytes
    return read_tensors(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    manifest = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
    shards = [(path / shard_file(shard.index)).read_bytes() for shard in manifest.shards]
    for shard, body in zip(manifest.shards, shards, strict=True):
        assert (len(body), xxhash.xxh3_128_hexdigest(body)) == (shard.num_bytes, shard.checksum)
    tensors = {}
    for entry in manifest.tensors:
        blob = shards[entry.shard][entry.offset : entry.offset + entry.num_bytes]
        assert xxhash.xxh3_128_hexdigest(blob) == entry.checksum
        flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(DTYPES[entry.dtype])
        tensors[entry.name] = flat.view(entry.shape)
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal to the byte: FP8 has no comparison of its own."""
    return one.keys() == other.keys() and all(
        one[name].view(torch.uint8).equal(other[name].view(torch.uint8))
        if one[name].dim()
        else bool(one[name] == other[name])
        for name in one
    )


async def test_the_life_of_a_rank(release: Path, tmp_path: Path) -> None:
    """Export v0, two steps, checkpoint, a third step; a second rank resumes and is bit-equal."""
    async with initialised(release, tmp_path / "first.log") as channel:
        events: list[tuple[str, dict[str, Any]]] = []
        channel.on_event = lambda name, payload: events.append((name, payload))
        first = await exported(channel, tmp_path / "v0", 0)
        assert_dequantises_to_the_same(first, load_release(release))

        metrics = await train(channel, 1)
        assert (metrics["step"], metrics["policy_version"]) == (1, 1)
        assert metrics["grad_norm"] > 0
        assert set(metrics["seconds"]) == {"logprobs", "forward_backward", "optimizer"}
        await train(channel, 2)
        with pytest.raises(ValueError, match="step 2 cannot follow step 2"):
            await train(channel, 2)
        with pytest.raises(ValueError, match="step 3 cannot be saved: step 2 is held"):
            await channel.request("save", {"step": 3, "path": str(tmp_path)}, timeout_s=60)
        saved = await channel.request(
            "save", {"step": 2, "path": str(tmp_path / "step2")}, timeout_s=60
        )
        assert saved == {"step": 2, "policy_version": 2, "complete": True}
        await train(channel, 3)
        undisturbed = await exported(channel, tmp_path / "v3", 3)
        assert not same(undisturbed, first)
        phases = {payload["phase"] for name, payload in events if name == "progress"}
        assert {"forward_backward", "optimizer", "export", "save"} <= phases

    async with initialised(release, tmp_path / "second.log") as channel:
        loaded = await channel.request("load", {"path": str(tmp_path / "step2")}, timeout_s=60)
        assert loaded == {"step": 2, "policy_version": 2}
        await train(channel, 3)
        assert same(await exported(channel, tmp_path / "replayed", 3), undisturbed)

        damaged = tmp_path / "step2" / "__0_0.distcp"
        body = bytearray(damaged.read_bytes())
        body[len(body) // 2] ^= 1
        damaged.write_bytes(body)
        with pytest.raises(RemoteError, match=r"(?s)WeightsCorrupt.*hash mismatch"):
            await channel.request("load", {"path": str(tmp_path / "step2")}, timeout_s=60)
        (tmp_path / "step2" / "complete.json").unlink()
        with pytest.raises(RemoteError, match="never finished"):
            await channel.request("load", {"path": str(tmp_path / "step2")}, timeout_s=60)


def assert_dequantises_to_the_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> None:
    assert one.keys() == other.keys()
    for name in one:
        if not is_scale(name):
            assert torch.equal(value(one, name), value(other, name)), name


def value(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scale = tensors.get(scale_name(name)) if name.endswith(".weight") else None
    return dequantise_tensor(name, tensors[name], scale=scale)


async def test_refused_steps_leave_the_weights_unchanged(release: Path, tmp_path: Path) -> None:
    async with initialised(release, tmp_path / "rank.log") as channel:
        sequences = [[1, 2, 3, 4, 5, 6], [7, 8], [9], list(range(60))]
        before = await channel.request(
            "score", {"sequences": sequences, "temperature": 0.9}, timeout_s=60
        )
        assert [len(row) for row in before["logprobs"]] == [5, 1, 0, 59]
        assert_scores_equal_reference(release, sequences, before["logprobs"], temperature=0.9)

        nan, huge = np.array([np.nan], np.float32), np.array([0, DEMO.vocab_size])
        one = {"token_ids": [5, 6], "num_prompt_tokens": 1}
        with pytest.raises(Rejected, match=r"100.0% of the sampler's log-probabilities"):
            await train(channel, 1, **one, sampler_logprobs=nan)
        with pytest.raises(Rejected, match="token id 320 is outside the vocabulary of 320"):
            await train(channel, 1, **one | {"token_ids": huge}, sampler_logprobs=[-1.0])
        with pytest.raises(Rejected, match=r"a gradient is not finite|loss is"):
            await train(channel, 1, advantage=3e38)
        with pytest.raises(Rejected, match="advantage is not finite"):
            await train(channel, 1, advantage=float("nan"))
        with pytest.raises(Rejected, match="exceeds the budget of 512"):
            await train(
                channel,
                1,
                token_ids=[3] * 600,
                num_prompt_tokens=1,
                sampler_logprobs=[-1.0] * 599,
            )
        with pytest.raises(Rejected, match="no sample has a response token"):
            await train(channel, 1, token_ids=[1], num_prompt_tokens=1, sampler_logprobs=[])
        with pytest.raises(ValueError, match="unknown operation 'dance'"):
            await channel.request("dance", timeout_s=60)
        asked = TraceRequest(sequences=[sequences[0]], rounding="sampler", layers=(1, 2))
        payload = {"request": asked.pack(), "policy_version": 7}
        traced = Traced.unpack((await channel.request("trace", payload, timeout_s=60))["traced"])
        assert traced.policy_version == 7
        assert traced.states[0]["layers.1.hc_ffn.merge"].shape == [
            6,
            DEMO.hc_mult,
            DEMO.hidden_size,
        ]
        after = await channel.request(
            "score", {"sequences": sequences, "temperature": 0.9}, timeout_s=60
        )
        assert after == before

        metrics = await train(channel, 1, **one, sampler_logprobs=[-1.0])
        assert metrics["bad_logprobs"] == 0


def assert_scores_equal_reference(
    release: Path, sequences: list[list[int]], rows: list[list[float]], *, temperature: float
) -> None:
    stored = load_release(release)
    weights = {name: value(stored, name) for name in stored if not is_scale(name)}
    reference = Reference(weights, DEMO)
    for ids, row in zip(sequences, rows, strict=True):
        if not row:
            continue
        logits = reference.forward(torch.tensor([ids])).logits[0, :-1] / temperature
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))
        np.testing.assert_allclose(row, expected.squeeze(-1).numpy(), atol=1e-4)


async def test_several_updates_clip_against_the_start_of_the_step(
    release: Path, tmp_path: Path
) -> None:
    async with ranks(tmp_path / "rank.log") as (channel, _):
        document = job(release, optimizer={"learning_rate": 0.02})
        document["algorithm"] = {"updates_per_batch": 3, "clip_low": 0.01, "clip_high": 0.01}
        await channel.request("init", {"job_id": "j", "job": document}, timeout_s=60)
        metrics = await train(channel, 1)
        assert metrics["seconds"]["logprobs"] > 0
        assert metrics["clip_share"] > 0.05
        assert metrics["response_tokens"] == sum(len(s.sampler_logprobs) for s in batch(1).samples)


async def test_two_pipeline_ranks_answer_as_one_does(release: Path, tmp_path: Path) -> None:
    """Scores, a step, export, save, refusals and load, asked of rank 0 alone."""
    sequences = [[1, 2, 3, 4, 5, 6], [7, 8], [9], list(range(60))]

    async def life(num_ranks: int, **actor: Any) -> tuple[dict[str, Any], list[list[float]]]:
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        async with initialised(release, folder / "log", num_ranks=num_ranks, **actor) as channel:
            metrics = await train(channel, 1)
            await exported(channel, folder / "v1", 1)
            await channel.request("save", {"step": 1, "path": str(folder / "step1")}, timeout_s=60)
            with pytest.raises(Rejected, match="token id 320 is outside the vocabulary of 320"):
                await train(
                    channel,
                    2,
                    token_ids=[5, 320],
                    num_prompt_tokens=1,
                    sampler_logprobs=[-1.0],
                )
            await train(channel, 2)
            await channel.request("load", {"path": str(folder / "step1")}, timeout_s=60)
            asked = {"sequences": sequences, "temperature": 0.9}
            scores = await channel.request("score", asked, timeout_s=60)
            assert scores["policy_version"] == 1
        return metrics, scores["logprobs"]

    one, expected = await life(1)
    two, scores = await life(2, parallel={"pipeline": 2})
    for name in ("loss", "grad_norm", "entropy", "delta_logprob_p99"):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    for name in ("response_tokens", "micro_batches", "padded_tokens", "step", "policy_version"):
        assert two[name] == one[name], name
    for row, expected_row in zip(scores, expected, strict=True):
        np.testing.assert_allclose(row, expected_row, atol=1e-5)
    published = [read_tensors(tmp_path / str(ranks) / "v1") for ranks in (1, 2)]
    assert_dequantises_to_the_same(*published)


async def test_a_rank_that_fails_alone_fails_all_in_words(release: Path, tmp_path: Path) -> None:
    """Weights that only the second stage holds are no numbers."""
    broken = tmp_path / "broken"
    shutil.copytree(release, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["layers.3.attn.wq_a.weight"].view(torch.uint8)[5, 7] = 0x7F  # E4M3's NaN
    save_file(tensors, broken / "model.safetensors")
    async with ranks(tmp_path / "log", 2) as (channel, _):
        document = job(broken, parallel={"pipeline": 2}) | {"cluster": {"gpus_per_node": 2}}
        for _ in range(2):  # refused, and asked again
            with pytest.raises(ValueError, match=r"rank 1: layers.3.attn.wq_a.weight.* found NaN"):
                await channel.request("init", {"job_id": "j", "job": document}, timeout_s=60)
        with pytest.raises(ValueError, match="TP1/DP1 has 1 ranks, 2 were started"):
            await channel.request("init", {"job_id": "j", "job": job(release)}, timeout_s=60)


async def test_bf16_actor_trains_and_exports(release: Path, tmp_path: Path) -> None:
    async with initialised(release, tmp_path / "rank.log", dtype="bfloat16") as channel:
        first = await exported(channel, tmp_path / "v0", 0)
        await train(channel, 1, num_samples=4)
        await channel.request("save", {"step": 1, "path": str(tmp_path / "step1")}, timeout_s=60)
        await train(channel, 2, num_samples=4)
        second = await exported(channel, tmp_path / "v2", 2)
        assert not same(first, second)
        await channel.request("load", {"path": str(tmp_path / "step1")}, timeout_s=60)
        await train(channel, 2, num_samples=4)
        assert same(await exported(channel, tmp_path / "replayed", 2), second)


async def test_a_killed_rank_is_noticed_and_leaves_nothing(release: Path, tmp_path: Path) -> None:
    async with ranks(tmp_path / "rank.log") as (channel, process):
        await channel.request("init", {"job_id": "j", "job": job(release)}, timeout_s=60)
        children = _children(process.pid)
        os.kill(process.pid, signal.SIGKILL)  # torchrun's agent: the ranks must not outlive it
        await asyncio.wait_for(channel.closed.wait(), 20)
        with pytest.raises(ChannelClosed):
            await channel.request("score", {"sequences": [[1, 2]]}, timeout_s=20)
        assert children
        await asyncio.to_thread(_wait_for_end, children, 10.0)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _wait_for_end(pids: list[int], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while running := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline_s, f"{running} still run after {within_s} s"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
