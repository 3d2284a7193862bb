"""Reference, trainer and sampler against transformers and against each other, same weights.

FP32 to 2e-5 of the largest logit with the same argmax everywhere; with the release's rounding on,
float64 to 1e-10, because in FP32 a rounding that flips a code shows as 0.01 and more.
"""

import pytest
import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.runtimes import from_runtime
from shared.quant import activation
from shared.quant import fast_activation as rounding
from shared.quant.activation import RELEASE, SERVED, ActivationQuant
from tests.parity.engines import (
    BOUND,
    CHUNKS,
    LENGTH,
    MODELS,
    QUANTISED_BOUND,
    actor_logits,
    case,
    departure,
    reference_logits,
    sampler_logits,
    stored,
    stored_values,
    twin,
)
from tests.tiny_deepseek_v4 import ALIGNED, SMALL, random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

ENGINES = {"reference": reference_logits, "actor": actor_logits, "sampler": sampler_logits}


@pytest.mark.parametrize("model", MODELS)
def test_transformers_keeps_every_tensor_where_its_column_of_names_says(model: str) -> None:
    known = case(model)
    weights, arch = known.weights, known.arch
    back = from_runtime(twin(arch, weights).state_dict(), arch, "transformers")
    assert back.keys() == {name for name in weights if not name.startswith("mtp.")}
    assert all(torch.equal(back[name], weights[name]) for name in back)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model: str, spread: float, engine: str) -> None:
    known = case(model, spread)
    ours = ENGINES[engine](known.arch, known.weights, known.tokens)
    assert departure(ours, known.logits) <= BOUND
    assert torch.equal(ours.argmax(-1), known.logits.argmax(-1))


@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_decoding_equal_transformers(model: str, spread: float) -> None:
    known = case(model, spread)
    ours = sampler_logits(known.arch, known.weights, known.tokens, chunks=CHUNKS)
    assert departure(ours, known.logits) <= BOUND
    assert torch.equal(ours.argmax(-1), known.logits.argmax(-1))


@pytest.mark.parametrize("model", ["small", "demo"])
def test_decoding_from_the_first_token_equals_transformers(model: str) -> None:
    known = case(model)
    length = 140  # past a block of 128
    tokens, theirs = known.tokens[:, :length], known.logits[:, :length]
    ours = sampler_logits(known.arch, known.weights, tokens, chunks=(1,) * length)
    assert departure(ours, theirs) <= BOUND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_that_underflow_equal_transformers(engine: str) -> None:
    """A hash layer's table may name experts that all score 0: then the token goes to none."""
    weights = random_weights(SMALL, seed=3)
    weights |= {n: 1000 * w for n, w in weights.items() if n.endswith("ffn.gate.weight")}
    tokens = random_tokens(SMALL, rows=1, length=64)
    states: dict[str, Tensor] = {}
    reference_logits(SMALL, weights, tokens, states=states)
    assert (states["layers.0.router"].sum(-1) == 0).any()
    with torch.no_grad():
        theirs = twin(SMALL, weights)(tokens).logits
    ours = ENGINES[engine](SMALL, weights, tokens)
    assert departure(ours, theirs) <= BOUND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_small_model_sees_every_selection() -> None:
    """The conditions without which the mistakes of test_mutations would stay hidden."""
    known, states = case("small"), dict[str, Tensor]()
    reference_logits(known.arch, known.weights, known.tokens, states=states)
    chosen = states["layers.2.attn.indexer"].sum(-1)
    assert chosen.max() == SMALL.index_topk < LENGTH // 4
    assert states["layers.3.attn.compressor"].shape[1] == 2
    assert (states["layers.4.router"] > 0).sum(-1).eq(SMALL.num_experts_per_tok).all()
    assert (case("small").logits.argmax(-1).unique().numel()) > 50


QUANTS = {"release": RELEASE, "served": SERVED}


@pytest.mark.parametrize("chunks", [(), CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_quantised_sampler_equals_rounding_reference_in_float64(
    form: str, quant: str, chunks: tuple[int, ...]
) -> None:
    arch = ALIGNED.with_format(form)  # type: ignore[arg-type]
    tokens = random_tokens(arch, rows=1, length=LENGTH)
    ours = _quantised_sampler(arch, tokens, QUANTS[quant], chunks)
    theirs = _rounding_reference(arch, tokens, QUANTS[quant])
    assert (ours - theirs).abs().max() <= QUANTISED_BOUND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def _quantised_sampler(
    arch: Architecture, tokens: Tensor, quant: ActivationQuant, chunks: tuple[int, ...]
) -> Tensor:
    tensors = stored(arch, random_weights(arch, seed=5))
    return sampler_logits(arch, tensors, tokens, quant=quant, dtype=torch.float64, chunks=chunks)


def _rounding_reference(arch: Architecture, tokens: Tensor, quant: ActivationQuant) -> Tensor:
    values = stored_values(stored(arch, random_weights(arch, seed=5)))
    return reference_logits(arch, values, tokens, quant=quant)


def test_fast_rounding_equals_the_shared_one_in_fp32() -> None:
    """Sub-module on equal inputs in its own precision: the decode loop's rounding, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator) * 4.0
    x[:, ::3] *= 2.0**-14  # values that underflow in their group
    x[0], x[1, :64] = 0.0, 1e-7
    assert torch.equal(rounding.round_linear_input(x), activation.quantise_linear_input(x))
    assert torch.equal(rounding.round_kv(x), activation.quantise_kv(x))
    for form in ("none", "fp8", "fp4"):
        ours = rounding.round_indexer(x, form=form)  # type: ignore[arg-type]
        assert torch.equal(ours, activation.quantise_indexer(x, form=form))  # type: ignore[arg-type]
