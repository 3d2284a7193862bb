"""An actor that trains in FP8: which products are rounded, what that changes and what not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.engine.actor import Actor
from services.trainer.fp8.emulated import EmulatedFp8
from services.trainer.fp8.products import EXACT, TakesProducts, products_as
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import write_release
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import ActivationQuant
from shared.quant.fp8 import dequantise_fp8, quantise_fp8
from shared.quant.policy import weight_class
from tests.parity.float64_actor import float64, float64_actor
from tests.parity.test_actor_step import batch, held, job, weights
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, random_tokens, random_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
ROUNDED = {
    *("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.indexer.wq_b", "ffn.experts"),
    *("ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3"),
    *("e_proj", "h_proj"),
}


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield
    parallel.leave()


def on_the_grid(name: str, value: Tensor) -> Tensor:
    """What a product takes of a weight. The release multiplies `wo_a` in BF16."""
    if weight_class(name) not in ("linear", "expert") or name.endswith("wo_a.weight"):
        return value
    return dequantise_fp8(*quantise_fp8(value)).double()


def test_the_release_s_fp8_products_are_rounded_and_no_others() -> None:
    """Router, hyper-connections, compressors, norms, `wo_a`, embedding and head are not."""
    model = DeepSeekV4(transformer_config(ALIGNED), ALIGNED)
    with products_as(model, EmulatedFp8()):
        names = {
            name.split(".", 2)[2]
            for name, module in model.named_modules()
            if isinstance(module, TakesProducts) and not getattr(module, "in_fp32", False)
        }
        assert names - {"attn.indexer.weights_proj"} == ROUNDED
        assert all(m.products is not EXACT for m in takers(model))
    assert all(m.products is EXACT for m in takers(model))


def takers(model: DeepSeekV4) -> list[TakesProducts]:
    return [module for module in model.modules() if isinstance(module, TakesProducts)]


@pytest.mark.usefixtures("float64_turns")
@pytest.mark.parametrize(("arch", "length"), [(SMALL, 300), (DEMO, 150), (ALIGNED, 150)])
def test_the_forward_pass_is_that_of_rounded_weights_and_inputs(
    arch: Architecture, length: int
) -> None:
    """Float64: in FP32 a sum in another order flips codes."""
    values = float64(random_weights(arch, seed=3))
    tokens = random_tokens(arch, rows=2, length=length)
    rounded = {name: on_the_grid(name, value) for name, value in values.items()}
    with torch.no_grad():
        model = float64_actor(arch, values)
        plain = model(tokens)
        with products_as(model, EmulatedFp8()):
            ours = model(tokens)
        theirs = Reference(rounded, arch, quant=ActivationQuant(linear=True)).forward(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    assert (ours - plain).abs().max() > 1e-2 * theirs.abs().max()


@pytest.mark.usefixtures("float64_turns")
def test_gradients_are_near_the_exact_ones_and_not_equal() -> None:
    """Of the same rounded forward pass, so that only the backward products differ."""
    values = {n: on_the_grid(n, w) for n, w in float64(random_weights(DEMO, seed=9)).items()}
    tokens = random_tokens(DEMO, rows=2, length=96)
    model = float64_actor(DEMO, values)
    cotangent = torch.randn(2, 96, DEMO.vocab_size, generator=torch.Generator().manual_seed(7))
    found = []
    for products in (EXACT, EmulatedFp8()):
        model.zero_grad()
        with products_as(model, products):
            logits = model(tokens, quant=ActivationQuant(linear=True))
            (logits * cotangent).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    exact, rounded = found
    assert exact.keys() == rounded.keys()
    # A sum of all tokens in one number may cancel, and then no share of it bounds the error.
    errors = {
        name: float((rounded[name] - grad).norm() / grad.norm())
        for name, grad in exact.items()
        if grad.numel() > 100
    }
    assert max(errors.values()) < 0.15, max(errors, key=errors.__getitem__)
    assert min(errors[n] for n in errors if any(part in n for part in ROUNDED)) > 1e-3
    assert errors["head.weight"] < 1e-12


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_are_rounded_alike(mode: Any) -> None:
    model = DeepSeekV4(transformer_config(DEMO), DEMO)
    load_weights(model, random_weights(DEMO, seed=3))
    tokens = random_tokens(DEMO, rows=2, length=64)
    found = []
    for recompute in ("none", mode):
        model.recompute(recompute, None)
        model.zero_grad()
        with products_as(model, EmulatedFp8()):
            model(tokens).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Masters off the sampler's grid: the actor starts from FP32 weights, the sampler has codes."""
    root = tmp_path_factory.mktemp("fp8")
    arch = replace(DEMO, swiglu_limit=10.0)
    for name, stored in (("sampler", "fp8"), ("actor", "fp32")):
        write_release(root / name, arch.with_format(stored), weights())
    model = {
        "rollout_checkpoint": str(root / "sampler"),
        "actor_checkpoint": str(root / "actor"),
    }
    return job(root, actor={"precision": "fp8"}).model_dump() | {"model": model}


def new_actor(document: dict[str, Any], **actor: Any) -> Actor:
    return Actor(Job.model_validate(document | {"actor": document["actor"] | actor}))


def test_an_actor_that_rounds_as_its_sampler_scores_the_same_in_fp8(
    document: dict[str, Any],
) -> None:
    """Rounding twice changes nothing, so FP8 training costs `quantisation = "full"` no drift."""
    ids = batch().samples[0].token_ids
    alike = {"quantisation": "full"}
    (fp8,) = new_actor(document, **alike).score([ids])
    (plain,) = new_actor(document, **alike, precision="dtype").score([ids])
    (unrounded,) = new_actor(document, precision="dtype").score([ids])
    assert abs(fp8 - plain).max() <= 1e-5
    assert abs(fp8 - unrounded).max() > 1e-2


@pytest.mark.parametrize("quantisation", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_masters_nearly_as_the_exact_one(
    document: dict[str, Any], dtype: str, quantisation: str
) -> None:
    alike = {"dtype": dtype, "quantisation": quantisation}
    found = [new_actor(document, **alike, precision=kind) for kind in ("dtype", "fp8")]
    exact, fp8 = (actor.train_step(batch()) for actor in found)
    assert fp8["loss"] == pytest.approx(exact["loss"], abs=0.005)
    assert fp8["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert fp8["grad_norm"] != exact["grad_norm"]
    assert not any(taker.products is not EXACT for taker in takers(found[1].model))


def test_other_ways_of_scoring_know_nothing_of_it(document: dict[str, Any]) -> None:
    """Attribution and walks ask for passes that round nothing, or as the sampler does."""
    ids = [batch().samples[0].token_ids]
    fp8, plain = new_actor(document), new_actor(document, precision="dtype")
    for rounding in ("none", "sampler"):
        assert (
            fp8.score(ids, rounding=rounding)[0] == plain.score(ids, rounding=rounding)[0]
        ).all()
    assert (fp8.score(ids)[0] != plain.score(ids)[0]).any()


def test_three_steps_are_repeatable_to_the_bit(document: dict[str, Any]) -> None:
    found = []
    for _ in range(2):
        actor = new_actor(document)
        for step in (1, 2, 3):
            actor.train_step(batch(step))
        found.append(held(actor))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
