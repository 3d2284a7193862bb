"""Activation in the engine itself: once, proven, reversible, and exact in mid-generation."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.scheduler import Scheduler
from services.rollout.engine.state_check import PrefixKept
from services.rollout.engine.weights import build_version
from services.rollout.models import deepseek_v4_weights
from services.rollout.models.deepseek_v4_weights import Block, Derived, derive
from shared.errors import OtherValues, WeightsCorrupt
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.weights.manifest import Manifest, shard_file
from shared.weights.protocol import CommitUpdate, PauseMode, Probe, ProbeSequence
from tests.integration.rollout_world import canonical_weights, write_version
from tests.tiny_deepseek_v4 import DEMO

ARCH = DEMO.with_format("fp8")
SEQUENCES = [list(range(5, 30)), [7, 300, 11, 2] * 9]


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, Tensor]]:
    return {name: canonical_weights(seed) for seed, name in enumerate("AB")}


@pytest.fixture
def engine() -> EmbeddedEngine:
    return new_engine()


def new_engine(*, slots: int = 8) -> EmbeddedEngine:
    spec = EngineSpec(ARCH, slots, context_length=64, quantise_activations=True, num_threads=1)
    return EmbeddedEngine(spec)


class Publisher:
    """Publishes tensors as the next version and has an engine activate them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = -1

    def activate(
        self,
        engine: EmbeddedEngine,
        tensors: Mapping[str, Tensor],
        *,
        mode: PauseMode = "in_place",
        probe: Probe | None = None,
        checksum: str | None = None,
    ) -> tuple[dict[str, object], list[tuple[str, list[Completion]]]]:
        self.version += 1
        folder = self.folder / str(self.version)
        manifest: Manifest = write_version(folder, dict(tensors), self.version)
        commit = CommitUpdate(pause_mode=mode, probe=probe, effective_checksum=checksum)
        return engine.activate(manifest, folder, commit)


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


def logprobs(engine: EmbeddedEngine) -> list[np.ndarray]:
    return engine.score(SEQUENCES, 1.0, None)[1]


def probe_for(tensors: Mapping[str, Tensor]) -> Probe:
    """What a trainer with these weights expects."""
    fresh = new_engine()
    version = build_version(0, ARCH, dict(tensors))
    fresh.scheduler.switch(version, "in_place")
    sequences = [
        ProbeSequence(token_ids=ids, logprobs=scores.tolist())
        for ids, scores in zip(SEQUENCES, logprobs(fresh), strict=True)
    ]
    return Probe(sequences=sequences, max_mean_abs_delta=0.01)


def request(name: str, *, samples: int = 4, tokens: int = 30, seed: int = 1) -> GroupRequest:
    return GroupRequest(
        name,
        np.array([5, 6, 7, 8, 9], np.int32),
        list(range(samples)),
        SamplingParams(max_response_tokens=tokens),
        seed,
    )


def run(engine: EmbeddedEngine, *, rounds: int | None = None) -> dict[str, list[Completion]]:
    done: dict[str, list[Completion]] = {}
    while engine.scheduler.has_work and rounds != 0:
        done |= dict(engine.scheduler.step())
        rounds = None if rounds is None else rounds - 1
    return done


@pytest.fixture
def built_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every layer whose derived state is really built, whoever asks for it."""
    built: list[int] = []
    build = deepseek_v4_weights._block

    def counted(arch: Architecture, layer: int, value: Callable[[str], Tensor]) -> Block:
        built.append(layer)
        return build(arch, layer, value)

    monkeypatch.setattr(deepseek_v4_weights, "_block", counted)
    return built


def test_updates_there_and_back_equal_a_fresh_load(
    engine: EmbeddedEngine,
    built_layers: list[int],
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
) -> None:
    seen: dict[str, tuple[object, list[np.ndarray]]] = {}
    for name in "ABAB":
        probe = probe_for(weights[name])
        built_layers.clear()
        result, _ = publisher.activate(engine, weights[name], probe=probe)
        assert built_layers == list(range(ARCH.num_hidden_layers))  # exactly once an update
        found = (result["effective_checksum"], logprobs(engine))
        if name in seen:
            assert found[0] == seen[name][0]
            assert all(np.array_equal(a, b) for a, b in zip(found[1], seen[name][1], strict=True))
        seen[name] = found
        fresh = new_engine()
        fresh.scheduler.switch(build_version(0, ARCH, weights[name]), "in_place")
        assert all(np.array_equal(a, b) for a, b in zip(found[1], logprobs(fresh), strict=True))
    assert seen["A"][0] != seen["B"][0]
    assert engine.policy_version == 3


def test_a_forgotten_rebuild_is_refused_by_the_probe(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    publisher.activate(engine, weights["A"])
    before, stale = logprobs(engine), engine.scheduler.version
    assert stale is not None
    engine._build = lambda arch, canonical: stale.derived
    told = r"probe: mean \|delta log p\| .* exceeds 0.01; embed.weight is not what was published"
    with pytest.raises(WeightsCorrupt, match=told):
        publisher.activate(engine, weights["B"], probe=probe_for(weights["B"]))
    assert engine.policy_version == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, logprobs(engine), strict=True))


@pytest.mark.parametrize("layer", [1, 3])
def test_a_probe_that_fails_names_the_first_layer_that_departs(
    layer: int,
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
) -> None:
    publisher.activate(engine, weights["A"])
    old = derive(ARCH, weights["A"])

    def build(arch: Architecture, canonical: Mapping[str, Tensor]) -> Derived:
        derived = derive(arch, canonical)
        derived.blocks[layer:] = old.blocks[layer:]
        return derived

    engine._build = build
    probe = probe_for(weights["B"])
    with pytest.raises(WeightsCorrupt, match=rf"probe: .*; layers\.{layer}\.\S+ is not what was"):
        publisher.activate(engine, weights["B"], probe=probe)
    engine._build = derive
    with pytest.raises(WeightsCorrupt, match=r"probe: .*; all tensors are what was published"):
        publisher.activate(engine, weights["A"], probe=probe)  # the trainer means another version


def _stale_sink(old: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    def build(arch: Architecture, canonical: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
        derived = derive(arch, canonical)
        derived.blocks[2].sink = derive(arch, old).blocks[2].sink
        return derived

    return build, "layers.2.attn.attn_sink"


def _scales_read_as_numbers(old: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    def build(arch: Architecture, canonical: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
        name = "layers.0.attn.wo_b.scale"
        raw = canonical[name].view(torch.uint8).float()
        return derive(arch, {**canonical, name: raw})

    return build, "layers.0.attn.wo_b.weight"


def _rebuilt_after_half(old: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    def build(arch: Architecture, canonical: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
        names = list(canonical)
        return derive(arch, {**canonical, **{n: old[n] for n in names[len(names) // 2 :]}})

    return build, ""  # the first by name of about half of all tensors


def _rebuilt_twice(old: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    """What a second pass over derived state does: scales are folded into values that have them."""

    def build(arch: Architecture, canonical: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
        derived = derive(arch, canonical)
        scale = canonical["layers.1.attn.wo_b.scale"].float()[0, 0]
        derived.blocks[1].out *= scale
        return derived

    return build, "layers.1.attn.wo_b.weight"


def _rebuilt_after_every_shard(old: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
    """The position biases are put in order once, with the first shard; later ones stay raw."""

    def build(arch: Architecture, canonical: Mapping[str, Tensor]):  # type: ignore[no-untyped-def]
        derived = derive(arch, canonical)
        first = derive(arch, {**old, "embed.weight": canonical["embed.weight"]})
        for block, latched in zip(derived.blocks, first.blocks, strict=True):
            if block.compressor is not None and latched.compressor is not None:
                block.compressor.ape = latched.compressor.ape
        return derived

    return build, ".attn.compressor.ape"


@pytest.mark.parametrize(
    "fault",
    [
        _stale_sink,
        _scales_read_as_numbers,
        _rebuilt_after_half,
        _rebuilt_twice,
        _rebuilt_after_every_shard,
    ],
)
def test_a_wrong_rebuild_is_refused_by_the_checksum_without_a_probe(
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
    fault,
) -> None:
    publisher.activate(engine, weights["A"])
    before = logprobs(engine)
    engine._build, named = fault(weights["A"])
    with pytest.raises(WeightsCorrupt, match="is not what was published") as refused:
        publisher.activate(engine, weights["B"])
    assert named in str(refused.value)
    assert engine.policy_version == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, logprobs(engine), strict=True))


def _stale_ring_half(derived: Derived, old: Derived) -> str:
    block, before = derived.blocks[1].compressor, old.blocks[1].compressor
    assert block is not None
    assert before is not None
    half = len(block.ape) // 2
    block.ape[half:] = before.ape[half:]
    return "layers.1.attn.compressor.ape"


def _bias_under_keys(derived: Derived, old: Derived) -> str:
    block = derived.blocks[2].compressor
    assert block is not None
    block.ape[:, 0] += 1
    return "layers.2.attn.compressor.ape"


def _stale_repeated_scale(derived: Derived, old: Derived) -> str:
    derived.blocks[3].ffn_mix.scale[-1] = old.blocks[3].ffn_mix.scale[-1] + 1
    return "layers.3.hc_ffn_scale"


@pytest.mark.parametrize("fault", [_stale_ring_half, _bias_under_keys, _stale_repeated_scale])
def test_a_stale_copy_beside_a_right_one_is_refused_without_a_probe(
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
    fault,
) -> None:
    """Where values lie several times, the checksum takes them from one place alone."""
    publisher.activate(engine, weights["A"])
    old, named = derive(ARCH, weights["A"]), ""

    def build(arch: Architecture, canonical: Mapping[str, Tensor]) -> Derived:
        nonlocal named
        derived = derive(arch, canonical)
        named = fault(derived, old)
        return derived

    engine._build = build
    with pytest.raises(WeightsCorrupt, match="copies in the derived state are not alike") as found:
        publisher.activate(engine, weights["B"])
    assert str(found.value).startswith(named)
    assert engine.policy_version == 0


def test_bad_tensors_are_named_and_the_old_version_serves(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    publisher.activate(engine, weights["A"])
    before = logprobs(engine)
    name = "layers.1.ffn.experts.3.w2.weight"
    codes = weights["B"][name].clone()
    codes.view(torch.uint8)[5, 5] = 0x7F
    table = weights["B"]["layers.0.ffn.gate.tid2eid"].clone()
    table[3, 1] = 8
    faults = {
        name: codes,
        "layers.0.ffn.gate.tid2eid": table,
        "layers.3.attn.wq_a.weight": weights["B"]["layers.3.attn.wq_a.weight"][:64],
        "norm.weight": weights["B"]["norm.weight"].float(),
    }
    for victim, tensor in faults.items():
        with pytest.raises(WeightsCorrupt, match=victim.replace(".", r"\.")):
            publisher.activate(engine, {**weights["B"], victim: tensor})
    assert engine.policy_version == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, logprobs(engine), strict=True))


def _forgets_nothing(scheduler: Scheduler) -> None:
    """What a switch without its last line does."""


def _forgets_prompts_alone(scheduler: Scheduler) -> None:
    for prefix in scheduler._prefixes:
        prefix.computed, prefix.logits = 0, None


def _forgets_completions_alone(scheduler: Scheduler) -> None:
    scheduler._slots.computed[:] = 0


def _says_that_it_forgot(scheduler: Scheduler) -> None:
    """Everything counts as not computed, and what is computed next lands elsewhere."""
    _forgets_prompts_alone(scheduler)
    _forgets_completions_alone(scheduler)
    stale = scheduler._scorer.score_runs

    def score_runs(runs, targets, temperature, *, version):  # type: ignore[no-untyped-def]
        return stale(runs, targets, temperature, version=version) + np.float32(0.01)

    scheduler._scorer.score_runs = score_runs  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "drop", [_forgets_nothing, _forgets_prompts_alone, _forgets_completions_alone]
)
@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_a_prefix_kept_over_the_switch_is_refused_and_the_old_version_serves(
    mode: PauseMode,
    drop: Callable[[Scheduler], None],
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("g"))
    engine.scheduler.add(request("waits", samples=16, tokens=3))  # its prompt is computed already
    run(engine, rounds=6)
    monkeypatch.setattr(Scheduler, "_drop_state", drop)
    with pytest.raises(PrefixKept, match="version 0 has computed was kept") as refused:
        publisher.activate(engine, weights["B"], mode=mode, probe=probe_for(weights["B"]))
    assert engine.policy_version == 0
    ended = dict(refused.value.ended) | run(engine)
    assert {one.version_spans[0][0] for found in ended.values() for one in found} == {0}
    check_tokens_against_versions(ended["g"], weights)
    monkeypatch.undo()
    publisher.activate(engine, weights["B"], probe=probe_for(weights["B"]))
    assert engine.policy_version == 2


def test_a_cached_prompt_that_scores_otherwise_is_refused(
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.activate(engine, weights["A"])
    probe = probe_for(weights["B"])
    monkeypatch.setattr(Scheduler, "_drop_state", _says_that_it_forgot)
    with pytest.raises(PrefixKept, match=r"cached before the switch is scored 0.01 off"):
        publisher.activate(engine, weights["B"], probe=probe)
    assert engine.policy_version == 0


def test_an_error_in_the_pause_puts_the_old_version_back(
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("g"))
    run(engine, rounds=6)
    score = Scheduler.score_witness

    def exhausted(scheduler: Scheduler, token_ids: np.ndarray, *, until: int) -> np.ndarray:
        if engine.policy_version == 1:
            raise RuntimeError("out of memory")
        return score(scheduler, token_ids, until=until)

    monkeypatch.setattr(Scheduler, "score_witness", exhausted)
    with pytest.raises(PrefixKept, match=r"cannot be scored: .*out of memory") as refused:
        publisher.activate(engine, weights["B"], mode="abort", probe=probe_for(weights["B"]))
    assert engine.policy_version == 0
    assert [name for name, _ in refused.value.ended] == ["g"]  # or nobody would be answered


def test_a_version_with_another_effective_checksum_than_is_expected_is_refused(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    first, _ = publisher.activate(engine, weights["A"])
    expected = str(first["effective_checksum"])
    publisher.activate(engine, weights["A"], checksum=expected)
    with pytest.raises(OtherValues, match=f"expected was {expected}"):
        publisher.activate(engine, weights["B"], checksum=expected)
    assert engine.policy_version == 1


def test_a_candidate_is_built_while_the_old_version_samples(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    """In another thread; tokens before the switch are of the old version alone."""
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("g"))
    run(engine, rounds=2)
    folder = publisher.folder / "1"
    manifest = write_version(folder, dict(weights["B"]), 1)
    commit = CommitUpdate(probe=probe_for(weights["B"]))
    with ThreadPoolExecutor(1) as builder:
        building = builder.submit(engine.prepare, manifest, folder, commit)
        rounds = 0
        while not building.done() and rounds < 20:
            run(engine, rounds=1)
            rounds += 1
        candidate = building.result(timeout=30)
    assert candidate.version.canonical == {}
    result, ended = engine.switch(candidate, commit)
    assert (result["version"], ended) == (1, [])
    completions = run(engine)["g"]
    assert {one.version_spans[0][0] for one in completions} == {0}
    assert {one.version_spans[1][0] for one in completions} == {1}
    check_tokens_against_versions(completions, weights)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_generation_goes_on_across_an_update_with_exact_spans(
    mode: PauseMode,
    engine: EmbeddedEngine,
    publisher: Publisher,
    weights: dict[str, dict[str, Tensor]],
) -> None:
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("g"))
    run(engine, rounds=10)
    _, ended = publisher.activate(engine, weights["B"], mode=mode)
    assert ended == []
    completions = run(engine)["g"]
    assert [one.version_spans for one in completions] == [[(0, 11), (1, 19)]] * 4
    check_tokens_against_versions(completions, weights)


def test_an_update_in_abort_mode_returns_what_there_is_and_it_can_go_on(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("g", samples=3))
    engine.scheduler.add(request("later", samples=16, tokens=3))
    run(engine, rounds=1)
    run(engine, rounds=5)
    _, ended = publisher.activate(engine, weights["B"], mode="abort")
    ((_, cut),) = [one for one in ended if one[0] == "g"]
    assert [one.finish_reason for one in cut] == ["abort"] * 3
    assert [one.version_spans for one in cut] == [[(0, len(one.token_ids))] for one in cut]
    engine.scheduler.add(
        GroupRequest(
            "g again",
            np.array([5, 6, 7, 8, 9], np.int32),
            [0, 1, 2],
            SamplingParams(max_response_tokens=30),
            1,
            partial=dict(enumerate(cut)),
        )
    )
    completions = run(engine)["g again"]
    num = len(cut[0].token_ids)
    assert [one.version_spans for one in completions] == [[(0, num), (1, 30 - num)]] * 3
    check_tokens_against_versions(completions, weights)


def check_tokens_against_versions(
    completions: list[Completion], weights: dict[str, dict[str, Tensor]]
) -> None:
    """Each recorded log-probability is the one that its own version gives to that token.

    A state kept across the update would show: the second span is scored from the first token on
    with the new weights alone.
    """
    for version, name in enumerate("AB"):
        fresh = new_engine()
        fresh.scheduler.switch(build_version(0, ARCH, weights[name]), "in_place")
        for one in completions:
            first = one.version_spans[0][1]
            span = slice(0, first) if version == 0 else slice(first, None)
            ids = [5, 6, 7, 8, 9, *one.token_ids.tolist()]
            scores = fresh.score([ids], 1.0, None)[1][0][4:]
            if np.abs(scores - one.logprobs)[span].max(initial=0.0) >= 1e-5:
                check_branches(ids, one.logprobs, span, weights[name])


def test_a_group_that_waits_is_sampled_by_the_new_version_alone(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    """Its prompt was computed under the old weights already."""
    publisher.activate(engine, weights["A"])
    engine.scheduler.add(request("first", samples=8))
    engine.scheduler.add(request("second", samples=2, seed=2))
    run(engine, rounds=3)
    publisher.activate(engine, weights["B"])
    done = run(engine)
    assert [one.version_spans for one in done["second"]] == [[(1, 30)]] * 2
    fresh = new_engine()
    fresh.scheduler.switch(build_version(0, ARCH, weights["B"]), "in_place")
    fresh.scheduler.add(request("second", samples=2, seed=2))
    for found, expected in zip(done["second"], run(fresh)["second"], strict=True):
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.logprobs, expected.logprobs)


def test_a_file_that_changes_after_it_was_staged_is_refused_when_it_is_loaded(
    engine: EmbeddedEngine, publisher: Publisher, weights: dict[str, dict[str, Tensor]]
) -> None:
    """The derived state would be that of the changed bytes, and so agree with them."""
    publisher.activate(engine, weights["A"])
    before = logprobs(engine)
    manifest = write_version(publisher.folder / "1", dict(weights["B"]), 1)
    entry = next(one for one in manifest.tensors if one.name == "layers.1.attn.wkv.weight")
    path = publisher.folder / "1" / shard_file(entry.shard)
    raw = bytearray(path.read_bytes())
    raw[entry.offset + 7] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightsCorrupt, match=rf"{path.name}: checksum \w+, the manifest says \w+"):
        engine.activate(manifest, path.parent, CommitUpdate())
    path.unlink()
    with pytest.raises(WeightsCorrupt, match=f"{path.name}: no such file"):
        engine.activate(manifest, path.parent, CommitUpdate())
    assert engine.policy_version == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, logprobs(engine), strict=True))


def check_branches(
    ids: list[int], logprobs: np.ndarray, span: slice, weights: dict[str, Tensor]
) -> None:
    """Experts whose scores differ by less than rounding may be chosen either way: one choice fits.

    The hyper-connections are moved by FP32 noise, which takes each side of a near tie at times.
    """
    generator = torch.Generator().manual_seed(1)
    mixing = {name: tensor for name, tensor in weights.items() if ".hc_" in name}
    assert {tensor.dtype for tensor in mixing.values()} == {torch.float32}
    deltas = []
    for _ in range(16):
        moved = {
            name: tensor * (1 + 1e-6 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in mixing.items()
        }
        engine = new_engine()
        engine.scheduler.switch(build_version(0, ARCH, weights | moved), "in_place")
        scores = engine.score([ids], 1.0, None)[1][0][4:]
        deltas.append(float(np.abs(scores - logprobs)[span].max()))
    assert min(deltas) < 1e-4
