"""What every rollout engine must do, whichever it is: imported by a module that gives `world`.

Truth is the reference model over the published tensors: what an engine samples or scores must have
the reference's log-probabilities under exactly the version that the engine says. Weights are FP8;
activations stay unrounded, since a rounding flips codes between implementations in FP32.
"""

import asyncio
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from services.rollout.engine.engine import Engine
from services.rollout.engine.requests import Completion, GroupRequest
from shared.errors import RemoteError
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import embedded_rounding
from shared.weights.protocol import CommitResult, CommitUpdate, PauseMode, Probe, ProbeSequence
from tests.integration.rollout_world import write_version

CHECKPOINT = Path("assets/tiny-dsv4")
PROMPT = [5, 17, 100, 33, 44, 9]
PROBE = [[5, 17, 100, 33, 44, 9, 301, 20, 21, 22, 23, 24], [3, 4, 5, 6, 7, 8, 9, 10]]
TOLERANCE = 1e-4  # |delta log p| between FP32 implementations of one model
ROUNDING = 1e-6  # relative noise of an activation, above what FP32 sums in another order give
NUM_BRANCHES = 16
CALL_S = 120.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


def variant(seed: int) -> dict[str, Tensor]:
    """The tiny policy's stored tensors, with attention moved: seed 0 is the policy itself."""
    stored = load_release(CHECKPOINT)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in list(stored.items()):
        if seed and ".attn." in name and tensor.dtype == torch.float8_e4m3fn:
            noise = 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
            moved = (tensor.float() * noise).clamp(-448, 448)
            stored[name] = moved.to(torch.float8_e4m3fn)
        elif seed and name.endswith("attn_sink"):
            stored[name] = tensor + 0.5
    return stored


def reference_logprobs(stored: Mapping[str, Tensor], token_ids: list[int]) -> np.ndarray:
    """FP32 of tokens 1.. ; computed once for the same values and tokens."""
    digest = xxhash.xxh3_128()
    for name in sorted(stored):
        digest.update(stored[name].contiguous().flatten().view(torch.uint8).numpy())
    key = (digest.hexdigest(), *token_ids)
    if key not in _KNOWN:
        _KNOWN[key] = _reference_logprobs(stored, token_ids)
    return _KNOWN[key]


_KNOWN: dict[tuple[str | int, ...], np.ndarray] = {}


def rounding_branches(stored: Mapping[str, Tensor], token_ids: list[int]) -> list[np.ndarray]:
    """The reference with its embedding moved by FP32 noise, several times.

    Two experts whose scores differ by less than rounding are chosen either way by correct engines,
    and every later token follows that choice; so each branch is right.
    """
    generator = torch.Generator().manual_seed(1)
    embedding = dequantised(stored)["embed.weight"]
    noise = [torch.randn(embedding.shape, generator=generator) for _ in range(NUM_BRANCHES)]
    return [_reference_logprobs(stored, token_ids, jitter=ROUNDING * one) for one in noise]


def _reference_logprobs(
    stored: Mapping[str, Tensor], token_ids: list[int], *, jitter: Tensor | None = None
) -> np.ndarray:
    arch, exact = Architecture.load(CHECKPOINT), embedded_rounding("fp8", activations=False)
    weights = dequantised(stored)
    if jitter is not None:
        weights["embed.weight"] = weights["embed.weight"] * (1 + jitter)
    model = Reference(weights, arch, quant=exact)
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logprobs = model.forward(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def assert_logprobs(
    found: np.ndarray, stored: Mapping[str, Tensor], token_ids: list[int], span: slice
) -> None:
    """`found` is the reference's for `span` of `token_ids`, or a branch of it at a near tie."""
    expected = reference_logprobs(stored, token_ids)[span]
    if np.allclose(found, expected, rtol=0, atol=TOLERANCE):
        return
    branches = [one[span] for one in rounding_branches(stored, token_ids)]
    if not any(np.allclose(found, one, rtol=0, atol=TOLERANCE) for one in branches):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


class Model(Protocol):
    """What an engine serves, and the truth about it."""

    vocab_size: int
    vector: str  # the name of a tensor with one axis

    def variant(self, seed: int) -> dict[str, Tensor]:
        """Stored tensors; the same seed is the same version, 0 what the engine started with."""

    def logprobs(self, stored: Mapping[str, Tensor], token_ids: list[int]) -> np.ndarray:
        """FP32 of tokens 1.. ."""

    def assert_logprobs(
        self, found: np.ndarray, stored: Mapping[str, Tensor], token_ids: list[int], span: slice
    ) -> None:
        """`found` is right for `span` of tokens 1.. ."""


class TinyDeepseekV4:
    vocab_size = Architecture.load(CHECKPOINT).vocab_size
    vector = "layers.1.attn_norm.weight"
    variant = staticmethod(variant)
    logprobs = staticmethod(reference_logprobs)
    assert_logprobs = staticmethod(assert_logprobs)


@dataclass
class World:
    """One engine, and every version that it was given."""

    engine: Engine  # or what answers like one
    folder: Path
    model: Model = field(default_factory=TinyDeepseekV4)
    long: int = 180  # tokens of a completion that runs on while a version comes
    stored: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def activate(
        self,
        stored: dict[str, Tensor],
        *,
        pause_mode: PauseMode = "in_place",
        probed_as: dict[str, Tensor] | None = None,
    ) -> CommitResult:
        """Stage and commit the next version; its probe is scored by `probed_as`, if given."""
        version = next(self.numbers)
        staged = self.folder / f"v{version}"
        write_version(staged, stored, version)
        self.stored[version] = stored
        expected = stored if probed_as is None else probed_as
        sequences = [
            ProbeSequence(token_ids=ids, logprobs=self.model.logprobs(expected, ids).tolist())
            for ids in PROBE
        ]
        probe = Probe(sequences=sequences, max_mean_abs_delta=1e-3)
        commit = CommitUpdate(pause_mode=pause_mode, probe=probe)
        return await self.engine.activate(staged, commit, timeout_s=CALL_S)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        return await self.engine.generate(request, timeout_s=CALL_S)

    def request(
        self,
        *,
        samples: int = 4,
        tokens: int = 24,
        stops: tuple[int, ...] = (),
        partial: dict[int, Completion] | None = None,
        temperature: float = 1.0,
    ) -> GroupRequest:
        return GroupRequest(
            request_id=self.engine.new_request_id(),
            prompt_token_ids=np.array(PROMPT, np.int32),
            samples=list(range(samples)),
            sampling=SamplingParams(
                max_response_tokens=tokens, stop_token_ids=list(stops), temperature=temperature
            ),
            seed=7,
            partial=partial or {},
        )

    def check(self, completion: Completion) -> None:
        """Every token has the reference's log-probability under the version that it names."""
        ids = PROMPT + completion.token_ids.tolist()
        assert sum(num for _, num in completion.version_spans) == len(completion.token_ids)
        begin = len(PROMPT) - 1
        at = 0
        for version, num in completion.version_spans:
            span = slice(begin + at, begin + at + num)
            found = completion.logprobs[at : at + num]
            self.model.assert_logprobs(found, self.stored[version], ids, span)
            at += num

    async def until_running(self, num: int) -> None:
        async with asyncio.timeout(30):
            while self.engine.load.running < num:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_samples_carry_the_references_logprobs(world: World) -> None:
    await world.activate(world.model.variant(0))
    completions = await world.generate(world.request(samples=4, tokens=16))
    assert [one.finish_reason for one in completions] == ["length"] * 4
    assert [len(one.token_ids) for one in completions] == [16] * 4
    assert len({one.token_ids.tobytes() for one in completions}) > 1
    for one in completions:
        world.check(one)


async def test_a_stop_token_ends_a_sample_and_is_kept(world: World) -> None:
    result = await world.activate(world.model.variant(0))
    free = (await world.generate(world.request(samples=1, tokens=12)))[0]
    stops = tuple(range(world.model.vocab_size))
    stopped = (await world.generate(world.request(samples=1, tokens=12, stops=stops)))[0]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) == len(stopped.logprobs) == 1
    assert free.finish_reason == "length"
    assert stopped.version_spans == [(result.version, 1)]
    world.check(stopped)


async def test_a_group_ends_early_once_enough_of_its_samples_are_complete(world: World) -> None:
    """Those that are not needed any more are cut short, and nothing of them runs on."""
    good = await world.activate(world.model.variant(0))
    begun = await world.generate(world.request(samples=2, tokens=110))
    request = world.request(samples=6, tokens=116, partial=dict(enumerate(begun)))
    completions = await world.generate(replace(request, enough=2))
    assert [one.finish_reason for one in completions] == ["length"] * 2 + ["abort"] * 4
    assert [len(one.token_ids) for one in completions[:2]] == [116] * 2
    for one in completions:
        assert {version for version, _ in one.version_spans} <= {good.version}
        world.check(one)
    assert max(len(one.token_ids) for one in completions[2:]) < 116
    async with asyncio.timeout(20):
        while world.engine.load.running:  # noqa: ASYNC110  the engine tells it, nobody is woken
            await asyncio.sleep(0.05)


async def test_scores_are_the_references_and_of_the_version_asked_for(world: World) -> None:
    result = await world.activate(world.model.variant(0))
    answer = await world.engine.score(
        PROBE, temperature=1.0, policy_version=result.version, timeout_s=CALL_S
    )
    assert answer["policy_version"] == result.version
    for raw, ids in zip(answer["logprobs"], PROBE, strict=True):
        world.model.assert_logprobs(
            np.frombuffer(raw, "<f4"), world.model.variant(0), ids, slice(None)
        )
    with pytest.raises(Exception, match="is not held"):
        await world.engine.score(PROBE, temperature=1.0, policy_version=10_000, timeout_s=CALL_S)


async def test_updates_there_and_back_equal_the_first_load(world: World) -> None:
    first = await world.activate(world.model.variant(0))
    other = await world.activate(world.model.variant(1))
    again = await world.activate(world.model.variant(0))
    assert first.effective_checksum == again.effective_checksum != other.effective_checksum
    assert world.engine.policy_version == again.version
    await test_scores_are_the_references_and_of_the_version_asked_for(world)


@pytest.mark.parametrize("pause_mode", ["in_place", "retract"])
async def test_an_update_in_mid_generation_gives_exact_spans(
    world: World, pause_mode: PauseMode
) -> None:
    before = await world.activate(world.model.variant(0))
    running = asyncio.create_task(world.generate(world.request(samples=4, tokens=world.long)))
    await world.until_running(4)
    after = await world.activate(world.model.variant(1), pause_mode=pause_mode)
    completions = await running
    assert {one.finish_reason for one in completions} == {"length"}
    versions = [[version for version, _ in one.version_spans] for one in completions]
    assert [before.version, after.version] in versions
    for one in completions:
        assert len(one.token_ids) == world.long
        world.check(one)


async def test_an_update_in_abort_mode_gives_back_what_there_is(world: World) -> None:
    before = await world.activate(world.model.variant(0))
    running = asyncio.create_task(world.generate(world.request(samples=4, tokens=world.long)))
    await world.until_running(4)
    after = await world.activate(world.model.variant(1), pause_mode="abort")
    cut = await running
    assert {one.finish_reason for one in cut} == {"abort"}
    assert any(one.version_spans == [(before.version, len(one.token_ids))] for one in cut)
    partial = dict(enumerate(cut))
    whole = await world.generate(world.request(samples=4, tokens=world.long, partial=partial))
    for one, begun in zip(whole, cut, strict=True):
        assert one.token_ids[: len(begun.token_ids)].tolist() == begun.token_ids.tolist()
        assert one.version_spans[-1][0] == after.version
        assert one.finish_reason == "length"
        world.check(one)


async def test_a_version_that_fails_its_probe_leaves_the_old_one_serving(world: World) -> None:
    good = await world.activate(world.model.variant(0))
    with pytest.raises(RemoteError, match="probe"):
        await world.activate(world.model.variant(1), probed_as=world.model.variant(0))
    assert world.engine.policy_version == good.version
    completions = await world.generate(world.request(samples=2, tokens=8))
    assert {version for one in completions for version, _ in one.version_spans} == {good.version}
    for one in completions:
        world.check(one)


async def test_a_tensor_of_another_shape_is_named_and_refused(world: World) -> None:
    good = await world.activate(world.model.variant(0))
    bad = world.model.variant(1)
    name = world.model.vector
    bad[name] = torch.ones(7, dtype=bad[name].dtype)
    with pytest.raises(Exception, match=re.escape(name)):
        await world.activate(bad, probed_as=world.model.variant(0))
    assert world.engine.policy_version == good.version
    world.check((await world.generate(world.request(samples=1, tokens=8)))[0])


async def test_a_paused_engine_samples_nothing_until_it_goes_on(world: World) -> None:
    await world.activate(world.model.variant(0))
    await world.engine.pause()
    running = asyncio.create_task(world.generate(world.request(samples=2, tokens=8)))
    done, _ = await asyncio.wait({running}, timeout=0.5)
    assert not done
    await world.engine.go_on()
    for one in await running:
        world.check(one)


async def test_a_caller_that_gives_up_ends_its_request(world: World) -> None:
    await world.activate(world.model.variant(0))
    running = asyncio.create_task(world.generate(world.request(samples=4, tokens=240)))
    await world.until_running(4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(20):
        while world.engine.load.running:  # noqa: ASYNC110  the engine tells it, nobody is woken
            await asyncio.sleep(0.05)


async def test_a_caller_that_gives_up_ends_what_waits_in_a_paused_engine(world: World) -> None:
    """At once: it neither stays in the queue nor is it sampled when the engine goes on."""
    await world.activate(world.model.variant(0))
    await world.engine.pause()
    try:
        waiting = asyncio.create_task(world.generate(world.request(samples=4, tokens=240)))
        async with asyncio.timeout(30):
            while world.engine.load.waiting < 4:  # noqa: ASYNC110  the engine tells it
                await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20):
            while world.engine.load.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await world.engine.go_on()
    (one,) = await world.generate(world.request(samples=1, tokens=8))
    world.check(one)


async def test_what_does_not_fit_is_refused_with_its_bound(world: World) -> None:
    await world.activate(world.model.variant(0))
    request = world.request(samples=1, tokens=8)
    long = GroupRequest(
        request.request_id, np.full(4096, 5, np.int32), [0], request.sampling, seed=1
    )
    with pytest.raises(ValueError, match="4096"):
        await world.generate(long)
