"""Replayed choices: drift falls where choices flip, and an actor makes those that it is told."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.routes import Recording
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import build_version
from services.rollout.models.deepseek_v4 import Sampler
from services.trainer.engine.actor import Actor
from services.trainer.engine.tokens import response_tokens
from services.trainer.models.deepseek_v4.trace import Routes
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.errors import Rejected
from shared.job_actor import ReplaySection
from shared.messages import SamplingParams, TrainingBatch, TrainingSample
from shared.models.deepseek_v4 import reference
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import quantise_tensor, write_release
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import RELEASE
from shared.quant.policy import POLICIES
from shared.routes import pack_routes, unpack_bits, unpack_routes
from tests.parity.engines import BOUND, GRADIENT_BOUND, actor, departure
from tests.parity.test_actor_step import job
from tests.tiny_deepseek_v4 import DEMO, random_tokens, random_weights
from tests.unit.shared.test_routes import random_routes

# What torch says of the way Megatron calls it.
pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of load:UserWarning"),
]

# Many experts of which few are taken, and entries of which three are kept: choices are close.
FLIPPING = replace(
    DEMO, n_routed_experts=32, num_experts_per_tok=4, num_hash_layers=1, swiglu_limit=10.0
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Random weights of which the sampler rounds weights and activations, the actor nothing."""

    arch: Architecture
    spread: float  # of the matrices
    boost: float = 1.0  # of what experts put out

    def weights(self) -> dict[str, Tensor]:
        weights = random_weights(self.arch, seed=3, spread=self.spread)
        for name, values in weights.items():
            if ".experts." in name and name.endswith("w2.weight"):
                values.mul_(self.boost)
        return weights


ROUTED = Policy(replace(FLIPPING, compress_ratios=(0, 8, 8, 0)), spread=1.0, boost=3.0)
INDEXED = Policy(replace(FLIPPING, compress_ratios=(4, 4, 4, 4)), spread=0.5)
BOTH = Policy(replace(FLIPPING, compress_ratios=(4, 4, 4, 4)), spread=1.0)


def sampled_batch(policy: Policy) -> TrainingBatch:
    """What an FP8 engine samples and records."""
    arch, stored = policy.arch.with_format("fp8"), {}
    for name, values in policy.weights().items():
        stored |= quantise_tensor(name, values, policy=POLICIES["fp8"])
    scheduler = Scheduler(
        Sampler(arch, RELEASE), limits=Limits(16, 64), recording=Recording(True, True)
    )
    scheduler.switch(build_version(0, arch, stored), "in_place")
    prompts = np.random.default_rng(0).integers(5, arch.vocab_size, (4, 12)).astype(np.int32)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_response_tokens=40)
        request = GroupRequest(
            str(number), prompt, [0, 1, 2], sampling, seed=number, with_routes=True
        )
        scheduler.add(request)
    samples = []
    while scheduler.has_work:
        for name, completions in scheduler.step():
            for index, one in enumerate(completions):
                assert one.routes is not None
                ids = np.concatenate((prompts[int(name)], one.token_ids))
                samples.append(
                    sample(f"{name}.{index}", ids, 12, one.logprobs, pack_routes(one.routes))
                )
    return training_batch(samples)


def sample(
    name: str, ids: np.ndarray, num_prompt: int, logprobs: np.ndarray, routes: bytes | None
) -> TrainingSample:
    return TrainingSample(
        rollout_id=name,
        group_id="g0",
        token_ids=ids,
        num_prompt_tokens=num_prompt,
        sampler_logprobs=logprobs,
        advantage=1.0,
        reward=1.0,
        oldest_version=0,
        routes=routes,
    )


def training_batch(samples: list[TrainingSample]) -> TrainingBatch:
    return TrainingBatch(
        job_id="test",
        step=1,
        policy_version=0,
        temperature=1.0,
        samples=samples,
        group_ids=["g0"],
    )


def new_actor(path: Path, policy: Policy, *, budget: int = 256, **replay: bool) -> Actor:
    if not (path / "config.json").exists():
        write_release(path, policy.arch.with_format("fp32"), policy.weights())
    return Actor(job(path, budget=budget, actor={"replay": replay}))


@pytest.mark.parametrize(
    ("policy", "replay", "share"),
    [(ROUTED, ["routing"], 0.6), (INDEXED, ["indexer"], 0.7), (BOTH, ["routing", "indexer"], 0.6)],
    ids=["routing", "indexer", "both"],
)
def test_drift_falls_where_choices_flip(
    policy: Policy, replay: list[str], share: float, tmp_path: Path
) -> None:
    batch = sampled_batch(policy)
    path = tmp_path / "release"
    plain = new_actor(path, policy).train_step(batch)
    told = new_actor(path, policy, **dict.fromkeys(replay, True)).train_step(batch)
    assert plain["delta_logprob_mean"] > 0.01
    for measure in ("mean", "p99"):
        name = f"delta_logprob_{measure}"
        assert told[name] < share * plain[name], name
    if len(replay) == 2:  # each part has a share in it
        for one in replay:
            alone = new_actor(path, policy, **{one: True}).train_step(batch)
            assert told["delta_logprob_mean"] < 0.8 * alone["delta_logprob_mean"], one
            assert alone["delta_logprob_mean"] < 0.9 * plain["delta_logprob_mean"], one


@pytest.mark.parametrize("axis", [0, 1], ids=["token", "layer"])
def test_routes_of_the_wrong_token_or_layer_would_be_seen(axis: int, tmp_path: Path) -> None:
    batch, told = sampled_batch(ROUTED), new_actor(tmp_path / "release", ROUTED, routing=True)
    right = told.train_step(batch)["delta_logprob_mean"]
    moved = [
        one.model_copy(update={"routes": shifted(one, told.architecture, axis)})
        for one in batch.samples
    ]
    other = new_actor(tmp_path / "release", ROUTED, routing=True)
    wrong = other.train_step(batch.model_copy(update={"samples": moved}))["delta_logprob_mean"]
    assert wrong > 3 * right


def shifted(one: TrainingSample, arch: Architecture, axis: int) -> bytes:
    assert one.routes is not None
    asked = {"routing": True, "indexer": False, "of": one.rollout_id}
    routes = unpack_routes(one.routes, arch, len(one.token_ids) - 1, **asked)
    assert routes.expert_ids is not None
    return pack_routes(replace(routes, expert_ids=np.roll(routes.expert_ids, 1, axis)))


def test_replayed_experts_are_weighed_by_the_actors_own_scores() -> None:
    """An actor told what a table says equals a model that reads the table, gradients included."""
    arch = DEMO
    table = replace(arch, num_hash_layers=arch.num_hidden_layers)
    weights = random_weights(table, seed=3)
    (tokens,) = random_tokens(arch, rows=1, length=70)
    tables = {layer: weights[f"layers.{layer}.ffn.gate.tid2eid"] for layer in range(4)}
    own = {n: w for n, w in random_weights(arch, seed=9).items() if n.endswith("gate.bias")}
    learned = {name: weights.get(name, own.get(name)) for name in random_weights(arch, seed=3)}
    model = actor(arch, learned)
    routes = Routes(replay={layer: tables[layer][tokens] for layer in (2, 3)})
    leaves = {n: w.clone().requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    ours = model(tokens[None], routes=routes)
    theirs = Reference(leaves, table).forward(tokens[None]).logits
    assert departure(ours.detach(), theirs.detach()) <= BOUND
    free = model(tokens[None]).detach()  # left to itself it chooses others
    assert departure(free, theirs.detach()) > 1e-2
    cotangent = torch.randn(ours.shape, generator=torch.Generator().manual_seed(7))
    (ours * cotangent).sum().backward()
    (theirs * cotangent).sum().backward()
    parameters = dict(model.named_parameters())
    for layer in range(4):
        name = f"layers.{layer}.ffn.gate.weight"
        found, expected = parameters[name].grad, leaves[name].grad
        assert found is not None
        assert expected is not None
        assert expected.norm() > 0
        assert (found - expected).norm() <= GRADIENT_BOUND * expected.norm(), name


def test_replayed_entries_are_those_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, tokens = random_weights(DEMO, seed=3), random_tokens(DEMO, rows=2, length=72)
    kept = np.stack(
        [unpack_bits(random_routes(72, seed=row).entry_bits, 18) for row in range(2)], 2
    )
    entries = {  # those before the first selecting token see everything
        layer: torch.from_numpy(kept[:, at].swapaxes(0, 1)) | (torch.arange(72) < 15)[:, None]
        for at, layer in enumerate((1, 3))
    }

    def told(part, x, rank, start, visible, state):
        reference.compress(part.under("compressor"), x, start, state, lambda part, entries: entries)
        return visible & entries[part.layer]

    model = actor(DEMO, weights)
    free = model(tokens).detach()
    ours = model(tokens, routes=Routes(entries=entries)).detach()
    monkeypatch.setattr(reference, "select", told)
    theirs = Reference(weights, DEMO).forward(tokens).logits
    assert departure(ours, theirs) <= BOUND
    assert departure(free, theirs) > 1e-2


def random_samples() -> list[TrainingSample]:
    """Of different lengths, with routes that no router would choose."""
    rng = np.random.default_rng(5)
    samples = []
    for index, (prompt, response) in enumerate([(4, 3), (20, 30), (9, 12), (16, 1), (5, 50)]):
        ids = rng.integers(0, DEMO.vocab_size, prompt + response)
        routes = pack_routes(random_routes(prompt + response - 1, seed=index))
        logprobs = -5 * np.ones(response, np.float32)
        samples.append(sample(f"g0.{index}", ids, prompt, logprobs, routes))
    return samples


@pytest.mark.parametrize("budget", [64, 128, 512])
def test_packing_keeps_rows_and_their_routes_together(budget: int, tmp_path: Path) -> None:
    policy = Policy(replace(DEMO, swiglu_limit=10.0), spread=1.0)
    told = new_actor(tmp_path / "release", policy, budget=budget, routing=True, indexer=True)
    tokens = response_tokens(
        training_batch(random_samples()),
        architecture=told.architecture,
        max_bad_share=0.0,
        replay=ReplaySection(routing=True, indexer=True),
    )
    found = told._score(tokens.sequences, 1.0).logprobs
    expected = [alone(told, sample) for sample in random_samples()]
    assert (found - torch.cat(expected)).abs().max() <= 1e-4
    free = new_actor(tmp_path / "release", policy, budget=budget)
    plain = free._score([replace(one, routes=None) for one in tokens.sequences], 1.0).logprobs
    assert (plain - found).abs().mean() > 0.1


@torch.no_grad()
def alone(told: Actor, one: TrainingSample) -> Tensor:
    """One sample in a row of its own, its routes laid out by hand."""
    assert one.routes is not None
    num = len(one.token_ids)
    asked = {"routing": True, "indexer": True, "of": one.rollout_id}
    routes = unpack_routes(one.routes, told.architecture, num - 1, **asked)
    assert routes.expert_ids is not None
    assert routes.entry_bits is not None
    replayed, last = Routes(), torch.tensor([[0, 1]])
    for layer in (2, 3):
        ids = torch.from_numpy(routes.expert_ids[:, layer].astype(np.int64))
        replayed.replay[layer] = torch.cat((ids, last))
    if num // 4 > told.architecture.index_topk:
        for at, layer in enumerate((1, 3)):
            kept = torch.ones(1, num, num // 4, dtype=torch.bool)
            bits = unpack_bits(routes.entry_bits[:, at], num // 4)
            kept[0, 15 : num - 1] = torch.from_numpy(bits[15:])
            replayed.entries[layer] = kept
    ids = torch.from_numpy(one.token_ids.astype(np.int64))
    logits = told.model(ids[None], routes=replayed)
    assert isinstance(logits, Tensor)
    scores = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return scores[one.num_prompt_tokens - 1 :]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, r"g0\.1 has no routes, which actor\.replay asks for"),
        (pack_routes(random_routes(48)), r"g0\.1: they are of 48 tokens, 49 are needed"),
    ],
)
def test_a_step_whose_routes_are_wrong_is_refused(
    routes: bytes | None, message: str, tmp_path: Path
) -> None:
    policy = Policy(replace(DEMO, swiglu_limit=10.0), spread=1.0)
    told = new_actor(tmp_path / "release", policy, routing=True)
    before = {name: tensor.clone() for name, tensor in release_tensors(told.model)}
    samples = random_samples()
    samples[1] = samples[1].model_copy(update={"routes": routes})
    with pytest.raises(Rejected, match=message):
        told.train_step(training_batch(samples))
    for name, tensor in release_tensors(told.model):
        assert torch.equal(tensor, before[name])
