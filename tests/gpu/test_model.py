"""Reference, Megatron actor and embedded engine on the device, against the CPU's reference in FP32.

Reference and embedded engine compute in FP32 only; the actor also in BF16.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import build_version, check_effective
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from services.rollout.models.deepseek_v4_weights import derive
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import SERVED, UNQUANTISED
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, random_tokens, random_weights

MODELS = {"aligned": ALIGNED, "small": SMALL, "demo": DEMO}
POLICY = Path("assets/tiny-dsv4")  # trained: random weights would blow up the smallest difference
LENGTH = 300
FP32_BOUND = 2e-5  # of the largest logit
BF16_BOUND = 0.1  # mean |Δ log p| on random tokens, which the policy finds unlikely

Figures = dict[str, Any]


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@pytest.mark.parametrize("name", MODELS)
def test_reference_in_fp32(name: str, figures: Figures) -> None:
    arch, weights, tokens, expected = case(name)
    found = Reference(on_device(weights), arch).forward(tokens.cuda()).logits
    _compare(figures, f"reference, {name}", expected, found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("megatron")
def test_actor_in_fp32(name: str, figures: Figures) -> None:
    arch, weights, tokens, expected = case(name)
    with torch.no_grad():
        found = actor(arch, weights, "float32")(tokens.cuda())
    _compare(figures, f"actor, {name}", expected, found)


@pytest.mark.parametrize("name", MODELS)
def test_embedded_engine_in_fp32(name: str, figures: Figures) -> None:
    arch, weights, tokens, expected = case(name)
    _compare(figures, f"embedded engine, {name}", expected, sampled(arch, weights, tokens))


@pytest.mark.usefixtures("megatron")
def test_gradients_in_fp32_are_finite_and_repeatable(figures: Figures) -> None:
    arch, weights, tokens, _ = case("demo")
    first, second = (gradients(arch, weights, tokens, "float32") for _ in range(2))
    worst = max(departure(first[name], second[name]) for name in first)
    figures.setdefault("model", {})["actor, gradients of two passes"] = worst
    assert all(gradient.isfinite().all() for gradient in first.values())
    assert worst < 1e-3


@pytest.mark.usefixtures("megatron")
def test_actor_in_bf16(figures: Figures) -> None:
    arch, weights, tokens, logits = case("policy")
    expected = logprobs(logits, tokens)
    for dtype in ("float32", "bfloat16"):
        with torch.no_grad():
            found = logprobs(actor(arch, weights, dtype)(tokens.cuda()).cpu(), tokens)
        drift = (found - expected).abs()
        figures.setdefault("model", {})[f"actor, trained policy, {dtype}"] = {
            "mean_abs_delta_logprob": drift.mean().item(),
            "p99_abs_delta_logprob": drift.quantile(0.99).item(),
        }
    assert drift.mean() < BF16_BOUND


def test_embedded_engine_samples_and_scores_on_the_device(figures: Figures) -> None:
    """A whole version: derived on the device, checked against what was published, sampled from."""
    arch, stored = Architecture.load(POLICY), load_release(POLICY)
    engines = []
    for device in ("cpu", "cuda"):
        limits = Limits(max_running=16, max_tokens=128)
        engine = Scheduler(Sampler(arch, SERVED), limits=limits, device=device)
        version = build_version(1, arch, stored, build=partial(derive, device=device))
        check_effective(arch, version)
        engine.switch(version, "in_place")
        engines.append(engine)
    here, there = engines
    assert here.version is not None
    assert there.version is not None
    assert here.version.checksum == there.version.checksum
    sampling = SamplingParams(max_response_tokens=40)
    there.add(GroupRequest("g", np.arange(3, 20, dtype=np.int32), list(range(8)), sampling, 7))
    done = dict(there.step())
    while there.has_work:
        done |= dict(there.step())
    completions = done["g"]
    assert len(completions) == 8
    prompt = np.arange(3, 20)
    whole = [np.concatenate([prompt, one.token_ids]).astype(np.int64) for one in completions]
    scores = here.score(whole, 1.0, version=here.version)
    drift = [
        np.abs(score[len(prompt) - 1 :] - one.logprobs)
        for score, one in zip(scores, completions, strict=True)
    ]
    mean = float(np.concatenate(drift).mean())
    figures.setdefault("model", {})["embedded engine sampling, cpu scoring"] = {
        "mean_abs_delta_logprob": mean
    }
    assert mean < 0.02


@cache
def case(name: str) -> tuple[Architecture, dict[str, Tensor], Tensor, Tensor]:
    """Architecture, values, tokens, and the logits of the CPU's reference."""
    if name == "policy":
        arch = Architecture.load(POLICY)
        weights = dequantised(load_release(POLICY))
    else:
        arch = MODELS[name]
        weights = random_weights(arch, seed=3)
    tokens = random_tokens(arch, rows=2, length=LENGTH)
    return arch, weights, tokens, Reference(weights, arch).forward(tokens).logits


def actor(arch: Architecture, weights: dict[str, Tensor], dtype: str) -> DeepSeekV4:
    model = DeepSeekV4(transformer_config(arch, dtype=dtype), arch, freeze_router=False)
    load_weights(model, weights)
    return model


def gradients(
    arch: Architecture, weights: dict[str, Tensor], tokens: Tensor, dtype: str
) -> dict[str, Tensor]:
    model = actor(arch, weights, dtype)
    total = logprobs(model(tokens.cuda()), tokens.cuda()).mean()
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@torch.inference_mode()
def sampled(arch: Architecture, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [B, S, V] of one prefill through the engine's model."""
    rows, length = tokens.shape
    cache = Cache(arch, num_slots=rows, max_tokens=length + 8, device="cuda")
    derived = derive(arch, weights, device="cuda")
    sampler = Sampler(arch, UNQUANTISED)
    step = cache.prefill_step([Run(row, 0, tokens[row].numpy()) for row in range(rows)])
    hidden = sampler.hidden(derived, cache, step)[: rows * length]
    return sampler.logits(derived, hidden).view(rows, length, -1)


def on_device(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in weights.items()}


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    normed = torch.log_softmax(logits.float()[:, :-1], -1)
    return normed.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def departure(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def _compare(figures: Figures, name: str, expected: Tensor, found: Tensor) -> None:
    worst = departure(found.cpu(), expected)
    figures.setdefault("model", {})[f"{name}, float32"] = {"largest_share_of_logit": worst}
    assert worst < FP32_BOUND
