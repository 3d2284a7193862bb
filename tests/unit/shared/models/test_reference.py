"""What the reference promises beyond one forward pass: decoding, rounding, MTP, traces."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import block_trace_points, trace_points
from shared.models.deepseek_v4.reference import Reference, initial_weights, sinkhorn
from shared.quant.activation import RELEASE, SERVED, UNQUANTISED, ActivationQuant
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED, random_tokens, random_weights

MODELS = {"aligned": ALIGNED, "small": SMALL, "demo": DEMO, "unscaled": UNSCALED}
CHUNKS = (7, 1, 123, 2, 1, 60, 1, 1, 1, 3)  # ends and resumes inside blocks of every ratio


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def in_chunks(model: Reference, tokens: Tensor, sizes: tuple[int, ...] = CHUNKS) -> Tensor:
    assert sum(sizes) == tokens.shape[1]
    state = model.new_state()
    return torch.cat([model.forward(t, state=state).logits for t in tokens.split(sizes, 1)], 1)


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_chunks_and_decoding_equal_one_prefill(model: str) -> None:
    arch = MODELS[model]
    reference = Reference(random_weights(arch, seed=2), arch)
    tokens = random_tokens(arch, rows=2, length=200)
    whole = reference.forward(tokens).logits
    assert (in_chunks(reference, tokens) - whole).abs().max() <= 2e-5 * whole.abs().max()


@pytest.mark.parametrize("quant", [UNQUANTISED, RELEASE, SERVED], ids=["none", "release", "served"])
@torch.no_grad()
def test_rounded_chunks_equal_one_prefill_in_float64(quant: ActivationQuant) -> None:
    reference = Reference(in_float64(random_weights(SMALL, seed=2)), SMALL, quant=quant)
    tokens = random_tokens(SMALL, rows=1, length=200)
    whole = reference.forward(tokens).logits
    assert (in_chunks(reference, tokens) - whole).abs().max() <= 1e-10


@torch.no_grad()
def test_every_rounding_hook_is_used() -> None:
    weights, tokens = random_weights(ALIGNED, seed=2), random_tokens(ALIGNED, rows=1, length=200)
    plain = Reference(weights, ALIGNED).forward(tokens).logits
    for quant in (
        ActivationQuant(linear=True),
        ActivationQuant(kv=True),
        ActivationQuant(indexer="fp8"),
        ActivationQuant(indexer="fp4"),
    ):
        rounded = Reference(weights, ALIGNED, quant=quant).forward(tokens).logits
        assert 1e-3 < (rounded - plain).abs().max() < plain.abs().max()


@torch.no_grad()
def test_snapshot_of_a_state_can_be_continued_twice() -> None:
    reference = Reference(random_weights(SMALL, seed=2), SMALL)
    tokens = random_tokens(SMALL, rows=1, length=150)
    state = reference.new_state()
    reference.forward(tokens[:, :131], state=state)
    snapshot = state.copy()
    first = reference.forward(tokens[:, 131:], state=state).logits
    again = reference.forward(tokens[:, 131:], state=snapshot).logits
    assert torch.equal(first, again)


@torch.no_grad()
def test_padding_on_the_right_changes_nothing() -> None:
    reference = Reference(random_weights(SMALL, seed=2), SMALL)
    tokens = random_tokens(SMALL, rows=3, length=140)
    padded = tokens.clone()
    padded[0, 100:], padded[1, 131:] = 0, 7
    logits = reference.forward(padded).logits
    for row, length in enumerate((100, 131, 140)):
        alone = reference.forward(tokens[row : row + 1, :length]).logits[0]
        assert (logits[row, :length] - alone).abs().max() <= 2e-5 * alone.abs().max()


@torch.no_grad()
def test_tied_indexer_scores_keep_the_older_entries() -> None:
    weights = random_weights(SMALL, seed=2)
    for name in weights:
        if name.endswith("indexer.weights_proj.weight"):
            weights[name] = torch.zeros_like(weights[name])  # every score is 0
    traced: dict[str, Tensor] = {}
    reference = Reference(weights, SMALL)
    tokens = random_tokens(SMALL, rows=1, length=200)
    whole = reference.forward(tokens, trace=traced.__setitem__).logits
    chosen = traced["layers.2.attn.indexer"][0]
    assert chosen[-1].nonzero().flatten().tolist() == list(range(SMALL.index_topk))
    assert (in_chunks(reference, tokens) - whole).abs().max() <= 2e-5 * whole.abs().max()


@torch.no_grad()
def test_prediction_block_continues_the_streams() -> None:
    weights, arch = random_weights(ALIGNED, seed=2), ALIGNED
    reference = Reference(weights, arch)
    tokens = random_tokens(arch, rows=2, length=90)
    streams = reference.forward(tokens[:, :-1]).streams
    whole = reference.mtp(streams, tokens[:, 1:])
    assert whole.logits.shape == (2, 89, arch.vocab_size)
    assert whole.streams.shape == streams.shape
    state, parts, at = reference.new_mtp_state(), [], 0
    for size in (40, 1, 30, 18):
        part = slice(at, at + size)
        next_tokens = tokens[:, 1:][:, part]
        parts.append(reference.mtp(streams[:, part], next_tokens, state=state).logits)
        at += size
    error = (torch.cat(parts, 1) - whole.logits).abs().max()
    assert error <= 2e-5 * whole.logits.abs().max()


@torch.no_grad()
def test_prediction_block_reads_all_of_its_tensors() -> None:
    weights, tokens = random_weights(ALIGNED, seed=2), random_tokens(ALIGNED, rows=1, length=60)
    streams = Reference(weights, ALIGNED).forward(tokens).streams
    before = Reference(weights, ALIGNED).mtp(streams, tokens).logits
    names = [n for n in weights if n.startswith("mtp.") and ".experts." not in n]
    for name in names:
        changed = weights | {name: weights[name] * 1.5 + 0.1}
        after = Reference(changed, ALIGNED).mtp(streams, tokens).logits
        assert (after - before).abs().max() > 1e-4, name


@torch.no_grad()
def test_model_reads_all_of_its_tensors() -> None:
    weights, tokens = random_weights(DEMO, seed=2), random_tokens(DEMO, rows=1, length=60)
    before = Reference(weights, DEMO).forward(tokens).logits
    names = [n for n in weights if ".experts." not in n or ".experts.3." in n]
    unread = []
    for name in names:
        tensor = weights[name]
        changed = (
            tensor.roll(1, 0) if name.endswith("tid2eid") else tensor * 1.5 + 0.1 * noise(tensor)
        )
        after = Reference(weights | {name: changed}, DEMO).forward(tokens).logits
        if (after - before).abs().max() < 1e-4:
            unread.append(name)
    assert not unread


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_trace_names_every_point_in_order(model: str) -> None:
    arch, names = MODELS[model], []
    reference = Reference(random_weights(arch, seed=2), arch)
    tokens = random_tokens(arch, rows=2, length=20)
    streams = reference.forward(tokens, trace=lambda name, tensor: names.append(name)).streams
    assert names == trace_points(arch)
    if arch.num_nextn_predict_layers:
        names.clear()
        reference.mtp(streams, tokens, trace=lambda name, tensor: names.append(name))
        inside = [f"mtp.0.{part}" for part in block_trace_points(arch, arch.num_hidden_layers)]
        assert names[: len(inside)] == inside


def test_sinkhorn_equals_a_plain_loop() -> None:
    logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).double()
    ours = sinkhorn(logits, SMALL)
    for b in range(2):
        for s in range(3):
            comb = _slow_sinkhorn(logits[b, s].view(4, 4), SMALL)
            assert torch.allclose(ours[b, s], comb, rtol=1e-12, atol=0)


def test_sinkhorn_gradient_is_right() -> None:
    arch = replace(SMALL, hc_sinkhorn_iters=4)
    logits = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, arch), logits.requires_grad_())


def test_fresh_model_learns_in_a_few_steps() -> None:
    weights = initial_weights(DEMO, generator=torch.Generator().manual_seed(0))
    leaves = [w.requires_grad_() for w in weights.values() if w.is_floating_point()]
    optimizer = torch.optim.Adam(leaves, lr=3e-3)
    tokens = (torch.arange(24) * 7 % 23 + torch.arange(4)[:, None]) % DEMO.vocab_size
    losses = []
    for _ in range(8):
        logits = Reference(weights, DEMO).forward(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def in_float64(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: w.double() if w.is_floating_point() else w for n, w in weights.items()}


def noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9))


def _slow_sinkhorn(logits: Tensor, arch: Architecture) -> Tensor:
    """Rows j, columns k, one number at a time."""
    C, eps = 4, arch.hc_eps
    comb = [[float(torch.exp(logits[j, k])) for k in range(C)] for j in range(C)]
    comb = [[c / sum(row) + eps for c in row] for row in comb]
    for turn in range(arch.hc_sinkhorn_iters):
        if turn:
            comb = [[c / (sum(row) + eps) for c in row] for row in comb]
        columns = [sum(comb[j][k] for j in range(C)) + eps for k in range(C)]
        comb = [[comb[j][k] / columns[k] for k in range(C)] for j in range(C)]
    return torch.tensor(comb, dtype=torch.float64)
