"""Gradients of every parameter against transformers' autograd, relative to the gradient's norm."""

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import weight_shapes
from shared.models.deepseek_v4.reference import Reference
from shared.models.deepseek_v4.runtimes import from_runtime
from tests.parity.engines import GRADIENT_BOUND, LENGTH, MODELS, Weights, actor, twin
from tests.tiny_deepseek_v4 import random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

# Gradients jump where a value is within rounding of the clamp: with these seeds none is, and every
# expert is chosen by some token.
SEEDS = {"aligned": 4, "small": 1, "demo": 7, "unscaled": 3}
Gradients = dict[str, Tensor]
Known = tuple[Architecture, Weights, Tensor, Tensor, Gradients]


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    """Weights, tokens, the gradient of the logits, and what transformers makes of it."""
    arch = MODELS[request.param]
    weights = random_weights(arch, seed=SEEDS[request.param])
    tokens = random_tokens(arch, rows=1, length=LENGTH)
    cotangent = torch.randn(1, LENGTH, arch.vocab_size, generator=torch.Generator().manual_seed(7))
    model = twin(arch, weights)
    (model(tokens).logits * cotangent).sum().backward()
    return arch, weights, tokens, cotangent, transformers_gradients(model, arch)


def test_actor_gradients_equal_transformers(known: Known) -> None:
    arch, weights, tokens, cotangent, theirs = known
    model = actor(arch, weights)
    (model(tokens) * cotangent).sum().backward()
    compare(actor_gradients(model), theirs, arch)


def test_reference_gradients_equal_transformers(known: Known) -> None:
    arch, weights, tokens, cotangent, theirs = known
    leaves = {n: w.clone().requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    (Reference(leaves, arch).forward(tokens).logits * cotangent).sum().backward()
    ours = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
    compare(ours, theirs, arch)


def test_gradients_of_scores_equal_transformers(known: Known) -> None:
    """The path that training takes: log-probabilities of labels, no logits kept."""
    arch, weights, tokens, _, _ = known
    factors = torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(8))
    model = actor(arch, weights)
    positions, labels = torch.arange(LENGTH - 1), tokens[0, 1:]
    scores = model(tokens, positions_N=positions, labels_N=labels)
    (scores.logprobs * factors).sum().backward()

    other = twin(arch, weights)
    logprobs = other(tokens).logits[0, :-1].log_softmax(-1).gather(1, labels.unsqueeze(1))
    (logprobs.squeeze(1) * factors).sum().backward()
    compare(actor_gradients(model), transformers_gradients(other, arch), arch)


def compare(ours: Gradients, theirs: Gradients, arch: Architecture) -> None:
    """Every tensor of the main model; what no loss reaches has no gradient on either side."""
    reached = 0
    for name in weight_shapes(arch):
        if name.startswith("mtp."):
            continue
        if not theirs[name].any():
            assert not ours[name].any(), name
            assert ".indexer." in name or "gate.bias" in name or "tid2eid" in name, name
            continue
        error = departure_in_norm(ours[name], theirs[name])
        assert error <= GRADIENT_BOUND, f"{name}: {error:.1e}"
        reached += 1
    assert reached > 100


def departure_in_norm(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def actor_gradients(model: DeepSeekV4) -> Gradients:
    """By release name, zero where there is none; the model is of no use afterwards."""
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    tables = (name for name in dict(release_tensors(model)) if name.endswith("tid2eid"))
    return dict(release_tensors(model)) | dict.fromkeys(tables, torch.zeros(1))


def transformers_gradients(model: DeepseekV4ForCausalLM, arch: Architecture) -> Gradients:
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            state[name] = parameter.grad
    return from_runtime(state, arch, "transformers")
