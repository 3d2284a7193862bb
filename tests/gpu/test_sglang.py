"""A real SGLang server with FP8 DeepSeek-V4 on a GPU: its updates against fresh loads, its model.

Skipped where there is no GPU, or no SGLang for it. `sglang_world` says what is compared with what.
"""

import importlib.util
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.sglang.buckets import Bucket, buckets_of
from services.rollout.engine.sglang.checkpoint import read_folder
from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.spec import TransportName
from services.rollout.engine.sglang.transports import (
    BUCKET_BYTES,
    Transport,
    send_bucket,
    transport_of,
)
from services.rollout.engine.weights import read_canonical
from shared.errors import WeightsCorrupt
from shared.messages import SamplingParams
from shared.models.deepseek_v4.checkpoint import dequantised
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import SERVED, UNQUANTISED
from tests.gpu.sglang_world import TEXTS, Driven, World, running

Figures = dict[str, Any]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang"),
]
_NUMBERS = itertools.count(100)  # of versions; none comes twice
FLOOR = 2e-3  # mean |delta log p| of a server against itself; 5e-4 was measured
# By transport: the server, and the versions that it gets.
UPDATES: dict[TransportName, tuple[str, tuple[str, ...]]] = {
    "disk": ("first", ("A", "B", "A", "B")),
    "tensor": ("second", ("B", "A", "B", "A")),
    "gloo": ("second", ("B", "A")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> AsyncIterator[World]:
    async with running(tmp_path_factory.mktemp("sglang")) as found:
        kept = figures.setdefault("sglang", {})
        kept["seconds_to_first_token"] = [found.first.start_s, found.second.start_s]
        kept["release_gb"] = found.staged["A"].num_bytes / 1e9
        yield found


async def test_noise_floor(world: World, figures: Figures) -> None:
    """The same server twice, and what it decoded against what it then scores."""
    scores = await world.first.scores()
    again = departure(scores, world.first.fresh)
    versions = departure(world.first.fresh, world.second.fresh)
    figures["sglang"]["same server twice"] = again
    figures["sglang"]["A against B"] = versions
    figures["sglang"]["same server twice, each text"] = [
        departure([one], [two]) for one, two in zip(scores, world.first.fresh, strict=True)
    ]
    assert again["mean"] < FLOOR
    assert is_exact(scores, world.first.fresh)
    assert versions["mean"] > 0.01


@pytest.mark.parametrize("transport", UPDATES)
async def test_updates_there_and_back_equal_a_fresh_load(
    transport: TransportName, world: World, figures: Figures
) -> None:
    which, names = UPDATES[transport]
    driven: Driven = getattr(world, which)
    driven.versions.transport = transport_of(transport)
    kept = figures["sglang"].setdefault(f"updates by {transport}", [])
    for number, name in enumerate(names, start=20 if transport == "gloo" else 1):
        scores, checksums = world.fresh(name)
        told = await driven.activate(world.staged[name], number, probed_as=scores)
        found = await driven.checksums()
        after = await driven.scores()
        told |= {
            "version": name,
            "short texts are a fresh load's": is_exact(after, scores),
            "scores against a fresh load": departure(after, scores),
            "checksums": len(checksums),
            "checksums that differ": [key for key in checksums if found.get(key) != checksums[key]],
        }
        kept.append(told)
    assert all(one["short texts are a fresh load's"] for one in kept)
    assert all(one["scores against a fresh load"]["mean"] < FLOOR for one in kept)
    assert all(not one["checksums that differ"] for one in kept)
    assert kept[0]["checksums"] > 50


async def test_other_weights_than_the_trainer_scored_are_refused(
    world: World, figures: Figures
) -> None:
    """B arrives whole, and is not what the probe says: A is loaded back and proven."""
    kept = figures["sglang"].setdefault("faults", {})
    told = await refused(world.first, world, "A", sent="B", probed_as="A")
    kept["wrong weights"] = told
    assert told["restarts"] == 0


async def test_a_grouped_output_matrix_apart_from_its_scale_is_refused(
    world: World, figures: Figures
) -> None:
    """Two calls that both succeed leave matrices of new codes and old scales: see the probe."""
    kept = figures["sglang"].setdefault("faults", {})
    told = await refused(
        world.second, world, "B", sent="A", probed_as="A", by=_SplitOutputMatrices()
    )
    kept["wo_a apart from its scale"] = told


async def test_samples_their_routes_and_scores(world: World, figures: Figures) -> None:
    driven = world.first
    scores, _ = world.fresh("A")
    await driven.activate(world.staged["A"], 50, probed_as=scores)
    prompt = np.array(TEXTS[0][:100], np.int32)
    sampling = SamplingParams(max_response_tokens=128)
    request = GroupRequest("sampled", prompt, list(range(16)), sampling, 7, with_routes=True)
    began_s = time.monotonic()
    completions = await driven.versions.engine.generate(request)
    seconds = time.monotonic() - began_s
    decoded = np.concatenate([one.logprobs for one in completions])
    whole = [[*prompt.tolist(), *one.token_ids.tolist()] for one in completions]
    scored = [
        (await driven.versions.engine.score_now([ids]))[0][len(prompt) - 1 :] for ids in whole
    ]
    figures["sglang"]["decoded against scored"] = departure([decoded], [np.concatenate(scored)])
    figures["sglang"]["sampled_tokens_per_s_at_16"] = round(len(decoded) / seconds)
    for one, ids in zip(completions, whole, strict=True):
        assert one.version_spans == [(50, len(one.token_ids))]
        assert one.routes is not None
        assert one.routes.expert_ids is not None
        assert len(one.routes.expert_ids) == len(ids) - 1
        for layer, table in driven.versions.engine.tables.items():
            assert np.array_equal(one.routes.expert_ids[:, layer], table[np.array(ids[:-1])])


async def test_scores_against_the_reference_on_the_gpu(world: World, figures: Figures) -> None:
    """In FP32, with and without the sampler's rounding. Random weights magnify every rounding: the
    floor is what the server itself differs by between decoding and scoring."""
    engine = world.first.versions.engine
    staged = world.staged["A"]
    stored = read_canonical(staged.manifest, staged.folder)
    weights = dequantised({name: tensor.cuda() for name, tensor in stored.items()})
    kept = figures["sglang"].setdefault("against the reference", {})
    for name, quant in {"rounded": SERVED, "unrounded": UNQUANTISED}.items():
        model = Reference(weights, engine.spec.arch, quant=quant)
        expected = [_reference_scores(model, text) for text in TEXTS[:2]]
        kept[name] = departure(world.first.fresh[:2], expected)
    assert kept["rounded"]["median"] < 1


@pytest.mark.parametrize("fault", ["query apart from keys", "odd bytes before integers"])
async def test_what_ends_the_server_is_refused_and_a_fresh_one_serves(
    fault: str, world: World, figures: Figures
) -> None:
    kept = figures["sglang"].setdefault("faults", {})
    driven = world.second
    restarts = driven.versions.restarts.total
    driven.versions.transport = transport_of("tensor")
    kept[fault] = await refused(driven, world, "B", sent="A", probed_as="A", by=_Ending(fault))
    assert driven.versions.restarts.total == restarts + 1


def is_exact(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    """Of the texts that the indexer does not select from: of the longest, the same server says
    other bits each time."""
    pairs = zip(found[:2], expected[:2], strict=True)
    return all(np.array_equal(one, two) for one, two in pairs)


def departure(found: list[np.ndarray], expected: list[np.ndarray]) -> dict[str, float]:
    """Of log-probabilities: mean, median, 99 % and largest |delta|."""
    delta = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(expected))
    return {
        "mean": float(delta.mean()),
        "median": float(np.median(delta)),
        "p99": float(np.quantile(delta, 0.99)),
        "max": float(delta.max()),
        "tokens": len(delta),
    }


async def refused(
    driven: Driven,
    world: World,
    good: str,
    *,
    sent: str,
    probed_as: str,
    by: Transport | None = None,
) -> dict[str, Any]:
    """`good` serves, something else is sent and must be refused, and `good` serves again."""
    scores, _ = world.fresh(good)
    number = next(_NUMBERS)
    await driven.activate(world.staged[good], number, probed_as=scores)
    expected, _ = world.fresh(probed_as)
    honest, driven.versions.transport = driven.versions.transport, by or driven.versions.transport
    began_s = time.monotonic()
    try:
        with pytest.raises(WeightsCorrupt) as caught:
            await driven.activate(world.staged[sent], next(_NUMBERS), probed_as=expected)
    finally:
        driven.versions.transport = honest
    seconds = round(time.monotonic() - began_s, 2)
    after = await driven.scores()
    told = {
        "error": str(caught.value)[:300],
        "seconds": seconds,
        "scores after it, against before": departure(after, scores),
        "restarts": driven.versions.restarts.total,
    }
    assert driven.versions.engine.policy_version == number
    assert is_exact(after, scores)
    return told


class _SplitOutputMatrices:
    """CUDA IPC that sends `wo_a` and its scale in different calls."""

    async def send(self, client: SGLangClient, folder: Any, *, timeout_s: float) -> None:
        tensors = read_folder(folder)
        late: Bucket = [(n, t) for n, t in tensors.items() if n.endswith("wo_a.scale")]
        rest = {n: t for n, t in tensors.items() if not n.endswith("wo_a.scale")}
        for bucket in buckets_of(rest, max_bytes=BUCKET_BYTES):
            await send_bucket(client, bucket, timeout_s=timeout_s)
        await send_bucket(client, late, timeout_s=timeout_s)


class _Ending:
    """CUDA IPC with a bucket that SGLang's tensor path does not survive."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    async def send(self, client: SGLangClient, folder: Any, *, timeout_s: float) -> None:
        tensors = read_folder(folder)
        if self._fault == "query apart from keys":
            tensors = {n: t for n, t in tensors.items() if ".attn.wkv." not in n}
        for bucket in buckets_of(tensors, max_bytes=BUCKET_BYTES):
            if self._fault == "odd bytes before integers":
                bucket = _misaligned(bucket)
            await send_bucket(client, bucket, timeout_s=timeout_s)


def _misaligned(bucket: Bucket) -> Bucket:
    """One tensor of 12 bytes, then the integer tables: a second one would align them again."""
    integers = [item for item in bucket if item[1].dtype == torch.int64]
    if not integers:
        return bucket
    odd = next(item for item in bucket if item[1].nbytes % 8)
    first = {name for name, _ in (odd, *integers)}
    return [odd, *integers, *(item for item in bucket if item[0] not in first)]


@torch.no_grad()
def _reference_scores(model: Reference, text: list[int]) -> np.ndarray:
    ids = torch.tensor([text], device="cuda")
    logprobs = model.forward(ids).logits[0, :-1].float().log_softmax(-1)
    found: np.ndarray = logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return found
