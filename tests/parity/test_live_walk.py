"""The walk between a trainer and a sampler that rounds names the place of each known mistake."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from services.rollout.engine.weights import build_version
from services.trainer.engine.actor import Actor
from shared.errors import Rejected
from shared.models.deepseek_v4.checkpoint import write_release
from shared.parity import live_walk
from shared.parity.judge import MARGINS
from shared.parity.live_walk import walk_sides
from shared.parity.trace import TraceRequest
from tests.parity import format_mutations as formats
from tests.parity.conftest import Findings
from tests.parity.engines import Case, stored
from tests.parity.format_mutations import FORMAT_MUTATIONS
from tests.parity.live_sides import SamplerSide, TrainerSide, job_of
from tests.parity.mutations import MUTATIONS
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

ARCH = SMALL.with_format("fp8")
TOKENS = random_tokens(ARCH, rows=1, length=300)[0].numpy()


@pytest.fixture(scope="module")
def right() -> dict[str, Tensor]:
    return random_weights(ARCH, seed=11)


@pytest.fixture(scope="module")
def trainer(
    right: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory, megatron: None
) -> TrainerSide:
    """Trains in FP32 without rounding: a walk makes it compute as its sampler does."""
    release = tmp_path_factory.mktemp("policy") / "release"
    write_release(release, ARCH, right)
    return TrainerSide(Actor(job_of(release)))


async def test_no_point_departs_between_honest_sides(
    trainer: TrainerSide, right: dict[str, Tensor]
) -> None:
    sampler = SamplerSide.of(ARCH, right)
    found = await walk_sides(trainer, sampler, ARCH, TOKENS, margin=MARGINS["float32"])
    assert (found.policy_version, found.result.first) == (0, None)
    assert len(found.result.points) > 90
    assert max(point.share for point in found.result.points) < 0.06


async def test_requests_out_of_bounds_are_refused(trainer: TrainerSide) -> None:
    beyond = TraceRequest(sequences=[np.array([1, ARCH.vocab_size])])
    with pytest.raises(ValueError, match=r"sequence 0: token id 512 is outside the vocabulary"):
        await trainer(beyond)
    with pytest.raises(ValueError, match=r"layers \[4, 9\] of a model with 5"):
        await trainer(TraceRequest(sequences=[TOKENS], layers=(4, 9)))
    with pytest.raises(ValueError, match="sequence 0 has 513 tokens, allowed are 2 to 512"):
        TraceRequest(sequences=[np.zeros(513, np.int32)])
    with pytest.raises(ValueError, match="0 streams for 1 sequences"):
        TraceRequest(sequences=[TOKENS], streams=[])
    with pytest.raises(ValueError, match="give them to the sampler"):
        await trainer(TraceRequest(sequences=[TOKENS], streams=[{}]))
    with pytest.raises(Rejected, match="not msgpack"):
        TraceRequest.unpack(b"\xc1")


async def test_some_layers_and_points_can_be_asked_for(
    trainer: TrainerSide, right: dict[str, Tensor]
) -> None:
    asked = TraceRequest(sequences=[TOKENS, TOKENS[:9]], layers=(2, 4), points=["router"])
    for side in (trainer, SamplerSide.of(ARCH, right)):
        found = (await side(asked)).states
        assert [sorted(states) for states in found] == [["layers.2.router", "layers.3.router"]] * 2
        assert [s["layers.2.router"].shape for s in found] == [[300, 8], [9, 8]]


async def test_a_walk_in_many_parts_finds_what_one_does(
    trainer: TrainerSide, right: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await walk_sides(
        trainer, SamplerSide.of(ARCH, right), ARCH, TOKENS[:40], margin=MARGINS["float32"]
    )
    recorded = (await trainer(TraceRequest(sequences=[TOKENS[:40]]))).states[0]
    for name, state in recorded.items():
        assert len(state.data) <= 4 * 40 * live_walk._width(name, ARCH), name
    widest = max(len(state.data) for state in recorded.values())
    monkeypatch.setattr(live_walk, "MAX_STATE_BYTES", 6 * widest)
    assert len(live_walk._parts(ARCH, 40)) > 5
    found = await walk_sides(
        trainer, SamplerSide.of(ARCH, right), ARCH, TOKENS[:40], margin=MARGINS["float32"]
    )
    assert found.result.points == whole.result.points


@pytest.fixture(scope="module")
def bf16_trainer(
    right: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory, megatron: None
) -> TrainerSide:
    release = tmp_path_factory.mktemp("policy") / "release"
    write_release(release, ARCH, right)
    return TrainerSide(Actor(job_of(release, dtype="bfloat16")))


@pytest.mark.parametrize("seed", range(1, 7))
async def test_no_point_departs_from_an_honest_bf16_trainer(
    seed: int, bf16_trainer: TrainerSide, right: dict[str, Tensor]
) -> None:
    tokens = random_tokens(ARCH, rows=1, length=256, seed=seed)[0].numpy()
    sampler = SamplerSide.of(ARCH, right)
    found = await walk_sides(bf16_trainer, sampler, ARCH, tokens, margin=MARGINS["bfloat16"])
    assert found.result.first is None, found.result.verdict


IN_SAMPLER = [name for name, mutation in MUTATIONS.items() if "sampler" in mutation.plants]
FINER_THAN_BF16 = {"sink in BF16", "APE in BF16", "compressor in FP8", "indexer's weights in FP8"}
"""They move less than the arithmetic of a BF16 trainer does. An update's checksum of effective
values sees them, whatever the trainer's precision."""


@pytest.mark.parametrize("mistake", [name for name in IN_SAMPLER if name not in FINER_THAN_BF16])
async def test_planted_mistake_is_named_by_a_bf16_trainer(
    mistake: str, bf16_trainer: TrainerSide, right: dict[str, Tensor], findings: Findings
) -> None:
    known = Case(ARCH, right, Tensor(), Tensor())
    with MUTATIONS[mistake].planted("sampler", known) as (arch, weights):
        sampler = SamplerSide.of(arch, weights)
        found = await walk_sides(bf16_trainer, sampler, ARCH, TOKENS, margin=MARGINS["bfloat16"])
    sizes = {"walk": max(point.size for point in found.result.points)}
    findings.add(mistake, "live, BF16", sizes, found.result.verdict)
    assert found.result.suspects == [MUTATIONS[mistake].at], found.result.verdict


@pytest.mark.parametrize("mistake", sorted(FINER_THAN_BF16))
def test_what_a_bf16_walk_cannot_see_changes_the_effective_checksum(
    mistake: str, right: dict[str, Tensor]
) -> None:
    known = Case(ARCH, right, Tensor(), Tensor())
    with MUTATIONS[mistake].planted("sampler", known) as (arch, weights):
        served = build_version(0, arch, stored(arch, weights))
    assert served.checksum != build_version(0, ARCH, stored(ARCH, right)).checksum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_indexer_that_keeps_everything_is_named_by_its_scores(
    dtype: str, right: dict[str, Tensor], tmp_path: Path
) -> None:
    """As Flash's does in all of the 512 tokens that a walk may have."""
    arch = replace(ARCH, index_topk=512)
    write_release(tmp_path / "release", arch, right)
    trainer = TrainerSide(Actor(job_of(tmp_path / "release", dtype=dtype)))
    asked = (arch, TOKENS)
    honest = await walk_sides(trainer, SamplerSide.of(arch, right), *asked, margin=MARGINS[dtype])
    assert honest.result.first is None, honest.result.verdict
    mutation = MUTATIONS["APE zero in the indexer"]
    with mutation.planted("sampler", Case(arch, right, Tensor(), Tensor())) as (_, weights):
        sampler = SamplerSide.of(arch, weights)
    found = await walk_sides(trainer, sampler, *asked, margin=MARGINS[dtype])
    assert found.result.suspects == [mutation.at], found.result.verdict
    selected = [p for p in found.result.points if p.name.endswith("attn.indexer")]
    assert [point.size for point in selected] == [0, 0], "every entry is selected"


@pytest.mark.parametrize("mistake", IN_SAMPLER)
async def test_planted_mistake_is_named(
    mistake: str, trainer: TrainerSide, right: dict[str, Tensor], findings: Findings
) -> None:
    mutation = MUTATIONS[mistake]
    known = Case(ARCH, right, Tensor(), Tensor())
    with mutation.planted("sampler", known) as (arch, weights):
        sampler = SamplerSide.of(arch, weights)
        found = await walk_sides(trainer, sampler, ARCH, TOKENS, margin=MARGINS["float32"])
    sizes = {"walk": max(point.size for point in found.result.points)}
    findings.add(mistake, "live", sizes, found.result.verdict)
    assert found.result.suspects == [mutation.at], found.result.verdict


# ------------------------------------------------------------------ number formats


@pytest.fixture(scope="module")
def format_trainers(
    tmp_path_factory: pytest.TempPathFactory, megatron: None
) -> dict[str, TrainerSide]:
    release = tmp_path_factory.mktemp("policy") / "release"
    write_release(release, formats.ARCH, formats.values())
    return {dtype: TrainerSide(Actor(job_of(release, dtype=dtype))) for dtype in MARGINS}


FINER_THAN_FLIPS = {"linear input in groups of 64", "keys in groups of 128"}
"""They move what is 2^-14 of its neighbours, less than a code that flips moves a row: named in
float64 and on equal inputs alone."""
FORMATS_SEEN = [name for name in FORMAT_MUTATIONS if name not in FINER_THAN_FLIPS]
NORMED_AWAY = {"E8M0 read as a number": "layer 0 · attention output projection"}
"""Every scale wrong by one factor: norms take it out of queries and keys, but for their epsilon."""
FINER_THAN_BF16_FORMATS = {"indexer in groups of 64"}


@pytest.mark.parametrize("dtype", list(MARGINS))
@pytest.mark.parametrize("mistake", FORMATS_SEEN)
async def test_wrong_format_in_a_served_sampler_is_named(
    mistake: str, dtype: str, format_trainers: dict[str, TrainerSide], findings: Findings
) -> None:
    mutation, margin = FORMAT_MUTATIONS[mistake], MARGINS[dtype]
    asked, tokens = format_trainers[dtype], formats.TOKENS[0].numpy()
    with mutation.planted(mutation.in_sampler):
        sampler = SamplerSide.of(formats.ARCH, formats.values())
        if not mutation.is_of_writer:  # the trainer writes what it publishes by the same code
            found = await walk_sides(asked, sampler, formats.ARCH, tokens, margin=margin)
    if mutation.is_of_writer:
        found = await walk_sides(asked, sampler, formats.ARCH, tokens, margin=margin)
    sizes = {"walk": max(point.size for point in found.result.points)}
    findings.add(mistake, f"live, {dtype}", sizes, found.result.verdict)
    if dtype == "bfloat16" and mistake in FINER_THAN_BF16_FORMATS:
        assert found.result.first is None, "it could be named: say so"
        return
    at = NORMED_AWAY.get(mistake, mutation.at)
    assert found.result.suspects == [at], found.result.verdict


async def test_sink_in_bf16_is_named_in_a_window_that_drowns_it(tmp_path: Path) -> None:
    """Of 128 keys: it moves fewer than a tenth of the rows by more than a flipped code may."""
    arch = replace(ARCH, sliding_window=128, index_topk=12, num_attention_heads=8, o_groups=4)
    weights, mutation = random_weights(arch, seed=1), MUTATIONS["sink in BF16"]
    tokens = random_tokens(arch, rows=1, length=300, seed=1)[0].numpy()
    write_release(tmp_path / "release", arch, weights)
    trainer = TrainerSide(Actor(job_of(tmp_path / "release")))
    with mutation.planted("sampler", Case(arch, weights, Tensor(), Tensor())) as (_, wrong):
        sampler = SamplerSide.of(arch, wrong)
    found = await walk_sides(trainer, sampler, arch, tokens, margin=MARGINS["float32"])
    assert found.result.suspects == ["layer 2 · attention core"], found.result.verdict
