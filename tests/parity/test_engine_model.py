"""The sampler's model against the reference: any chunking, any mixture of lengths, any format."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from services.rollout.models.deepseek_v4_weights import Derived, derive, effective, published
from shared.models.deepseek_v4.architecture import Architecture, WeightFormat
from shared.models.deepseek_v4.checkpoint import dequantised, quantise_tensor
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import RELEASE, SERVED, UNQUANTISED, ActivationQuant
from shared.quant.policy import POLICIES
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED, random_tokens, random_weights

SHAPES = {"demo": (DEMO, 70), "small": (SMALL, 265), "unscaled": (UNSCALED, 70)}
CHUNKS = {"full": [10_000], "chunked": [7, 1, 64, 2, 33], "decoded": [-24]}
"""Tokens fed at a time; a negative number leaves so many for decoding, across block borders."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def canonical(arch: Architecture, weight_format: WeightFormat, *, seed: int = 0, spread: float = 1):
    stored: dict[str, Tensor] = {}
    for name, values in random_weights(arch, seed=seed, spread=spread).items():
        stored |= quantise_tensor(name, values, policy=POLICIES[weight_format])
    return arch.with_format(weight_format), stored


def engine_logits(
    arch: Architecture,
    derived: Derived,
    tokens_BS: Tensor,
    *,
    quant: ActivationQuant,
    dtype: torch.dtype,
    chunks: Sequence[int],
) -> Tensor:
    """Logits [B, S, V]; rows are fed at different times, so that a batch mixes lengths."""
    num, length = tokens_BS.shape
    decodes = chunks[0] < 0
    cache = Cache(arch, num_slots=num, max_tokens=length, dtype=dtype)
    model = Sampler(arch, quant)
    ends = [length - 3 * row for row in range(num)]
    positions = [0] * num
    logits = torch.full((num, length, arch.vocab_size), torch.nan, dtype=dtype)
    sizes = [[size if size > 0 else length + size for size in chunks] for _ in range(num)]
    while rows := [row for row in range(num) if positions[row] < ends[row]]:
        if decodes and not any(sizes):
            step = cache.decode_step(
                np.array(rows),
                np.array([positions[row] for row in rows]),
                np.array([int(tokens_BS[row, positions[row]]) for row in rows]),
            )
            counts = [1] * len(rows)
        else:
            counts = [
                min(sizes[row].pop(0) if sizes[row] else 90, ends[row] - positions[row])
                for row in rows
            ]
            step = cache.prefill_step(
                [
                    Run(row, positions[row], tokens_BS[row, positions[row] :][:count].numpy())
                    for row, count in zip(rows, counts, strict=True)
                ]
            )
        out = model.logits(derived, model.hidden(derived, cache, step))[: sum(counts)]
        for row, part in zip(rows, out.split(counts), strict=True):
            logits[row, positions[row] : positions[row] + len(part)] = part
            positions[row] += len(part)
    return logits


def reference_logits(
    arch: Architecture, stored: Mapping[str, Tensor], tokens: Tensor, quant: ActivationQuant, dtype
) -> Tensor:
    values = {
        name: value if value.dtype == torch.int64 else value.to(dtype)
        for name, value in dequantised(stored).items()
    }
    with torch.no_grad():
        return Reference(values, arch, quant=quant).forward(tokens).logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_fp32_agrees_with_the_reference(shape: str, spread: float) -> None:
    small, length = SHAPES[shape]
    arch, stored = canonical(small, "fp32", spread=spread)
    tokens = random_tokens(arch, rows=3, length=length)
    expected = reference_logits(arch, stored, tokens, UNQUANTISED, torch.float32)
    derived = derive(arch, stored)
    for chunks in CHUNKS.values():
        found = engine_logits(
            arch, derived, tokens, quant=UNQUANTISED, dtype=torch.float32, chunks=chunks
        )
        known = ~found.isnan()
        assert known.float().mean() > 0.95
        error = (found - expected)[known].abs().max()
        assert error <= 2e-5 * expected.abs().max()
        agree = found.argmax(-1) == expected.argmax(-1)
        assert agree[known[..., 0]].all()


@pytest.mark.parametrize("shape", [*SHAPES, "aligned"])
@pytest.mark.parametrize("quant", [RELEASE, SERVED], ids=["release", "served"])
def test_quantised_agrees_with_the_reference_in_float64(shape: str, quant: ActivationQuant) -> None:
    small, length = {**SHAPES, "aligned": (ALIGNED, 140)}[shape]
    weight_format: WeightFormat = "fp4" if shape == "aligned" else "fp8"
    arch, stored = canonical(small, weight_format)
    tokens = random_tokens(arch, rows=2, length=length)
    expected = reference_logits(arch, stored, tokens, quant, torch.float64)
    derived = derive(arch, stored, dtype=torch.float64)
    for chunks in CHUNKS.values():
        found = engine_logits(
            arch, derived, tokens, quant=quant, dtype=torch.float64, chunks=chunks
        )
        known = ~found.isnan()
        assert (found - expected)[known].abs().max() <= 1e-10


def test_shared_expert_clamp_follows_its_flag() -> None:
    outputs = []
    for clamped in (True, False):
        arch, stored = canonical(replace(DEMO, clamp_shared_experts=clamped), "fp32")
        tokens = random_tokens(arch, rows=1, length=20)
        expected = reference_logits(arch, stored, tokens, UNQUANTISED, torch.float32)
        found = engine_logits(
            arch, derive(arch, stored), tokens, quant=UNQUANTISED, dtype=torch.float32, chunks=[20]
        )
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
        outputs.append(expected)
    assert (outputs[0] - outputs[1]).abs().max() > 0.1  # the clamp binds


def test_equal_router_scores_go_to_the_lower_experts() -> None:
    """Whatever the shape of the batch: half of the biases are the highest, and no gate tells them
    apart."""
    shape = replace(DEMO, n_routed_experts=48, num_experts_per_tok=5, num_hash_layers=0)
    arch, stored = canonical(shape, "fp32")
    for layer in range(arch.num_hidden_layers):
        stored[f"layers.{layer}.ffn.gate.weight"].zero_()
        stored[f"layers.{layer}.ffn.gate.bias"] = torch.arange(48.0).remainder(2)
    tokens = random_tokens(arch, rows=3, length=40)
    expected = reference_logits(arch, stored, tokens, UNQUANTISED, torch.float32)
    for chunks in CHUNKS.values():
        found = engine_logits(
            arch,
            derive(arch, stored),
            tokens,
            quant=UNQUANTISED,
            dtype=torch.float32,
            chunks=chunks,
        )
        known = ~found.isnan()
        assert (found - expected)[known].abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", [*SHAPES, "aligned"])
def test_a_row_has_the_same_bits_alone_and_among_others(shape: str) -> None:
    """A completion must not depend on its neighbours; FP8 rounding would magnify a last bit."""
    small, _ = {**SHAPES, "aligned": (ALIGNED, 0)}[shape]
    arch, stored = canonical(small, "fp8")
    derived, rng = derive(arch, stored), np.random.default_rng(1)
    sequences = [rng.integers(0, arch.vocab_size, int(rng.integers(8, 48))) for _ in range(41)]
    together = _fed_in_batches(arch, derived, sequences, rows=list(range(41)))
    for row in (0, 7, 19, 33, 40):
        alone = _fed_in_batches(arch, derived, sequences, rows=[row])
        assert torch.equal(alone[row], together[row]), f"row {row}"


def _fed_in_batches(
    arch: Architecture, derived: Derived, sequences: list[np.ndarray], *, rows: list[int]
) -> dict[int, Tensor]:
    """Prompts of a third of each sequence in two batches, then decoding all that are left."""
    model = Sampler(arch, RELEASE)
    cache = Cache(arch, num_slots=len(rows), max_tokens=64)
    slot = {row: place for place, row in enumerate(rows)}
    position = {row: max(1, len(sequences[row]) // 3) for row in rows}
    logits: dict[int, list[Tensor]] = {row: [] for row in rows}
    for batch in (rows[::2], rows[1::2]):
        if batch:
            runs = [Run(slot[row], 0, sequences[row][: position[row]]) for row in batch]
            hidden = model.hidden(derived, cache, cache.prefill_step(runs))
            ends = torch.tensor(np.cumsum([position[row] for row in batch]) - 1)
            for row, part in zip(batch, model.logits(derived, hidden[ends]), strict=True):
                logits[row].append(part)
    while active := [row for row in rows if position[row] < len(sequences[row])]:
        step = cache.decode_step(
            np.array([slot[row] for row in active]),
            np.array([position[row] for row in active]),
            np.array([sequences[row][position[row]] for row in active]),
        )
        out = model.logits(derived, model.hidden(derived, cache, step))
        for row, part in zip(active, out, strict=False):
            logits[row].append(part)
            position[row] += 1
    return {row: torch.stack(parts) for row, parts in logits.items()}


@pytest.mark.parametrize("weight_format", ["fp8", "fp4", "bf16", "fp32"])
def test_derived_state_gives_back_what_was_published(weight_format: WeightFormat) -> None:
    for small in (ALIGNED, UNSCALED):
        if weight_format == "fp4" and small is not ALIGNED:
            continue
        arch, stored = canonical(small, weight_format)
        found = list(effective(arch, derive(arch, stored)))
        expected = list(published(arch, stored))
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, value), (_, wanted) in zip(found, expected, strict=True):
            assert torch.equal(value, wanted), name


def test_state_of_an_earlier_sequence_does_not_leak() -> None:
    """A slot is used again without being cleared."""
    arch, stored = canonical(DEMO, "fp8")
    derived, model = derive(arch, stored), Sampler(arch, RELEASE)
    cache = Cache(arch, num_slots=1, max_tokens=64)
    tokens = random_tokens(arch, rows=2, length=40)

    def run(ids: Tensor) -> Tensor:
        first = model.hidden(derived, cache, cache.prefill_step([Run(0, 0, ids[:9].numpy())]))
        rest = [
            model.hidden(
                derived,
                cache,
                cache.decode_step(np.array([0]), np.array([at]), ids[at : at + 1].numpy()),
            )[:1]
            for at in range(9, len(ids))
        ]
        return torch.cat((first[:9], *rest))

    fresh = run(tokens[0])
    run(tokens[1])
    assert torch.equal(run(tokens[0]), fresh)
