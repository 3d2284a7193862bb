"""Each hand-written backward of the actor against finite differences in FP64, and slow twins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.fp8.products import EXACT
from services.trainer.models.deepseek_v4 import hyper_connections as hc
from services.trainer.models.deepseek_v4.attention_core import Reach, attend, visible
from services.trainer.models.deepseek_v4.experts import _GroupedSwiGLU, _SumRows, _TakeRows
from services.trainer.models.deepseek_v4.head import _Score
from services.trainer.models.deepseek_v4.indexer import top_mask
from services.trainer.models.deepseek_v4.layers import ClampedSwiGLU, _RMSNorm
from services.trainer.models.deepseek_v4.rope import norm_rotate, rotate
from services.trainer.models.deepseek_v4.router import sqrt_softplus
from shared.quant.activation import UNQUANTISED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check(function: Any, *inputs: Any) -> None:
    assert torch.autograd.gradcheck(function, inputs)


def turns(length: int, pairs: int) -> Tensor:
    angles = torch.rand(length, pairs, dtype=torch.float64) * 3
    return torch.polar(torch.ones_like(angles), angles)


def test_rms_norm_gradient() -> None:
    check(lambda x, w: _RMSNorm.apply(x, w, 1e-6), leaf(3, 2, 6), leaf(6))


def test_rotations_gradients() -> None:
    table = turns(3, 2)
    check(lambda x: rotate(x, table), leaf(2, 3, 6))
    table = table.unsqueeze(1)
    check(lambda x: rotate(x, table, inverse=True), leaf(2, 3, 2, 6))
    check(lambda x: norm_rotate(x, table, 1e-6), leaf(2, 3, 2, 6))


@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_swiglu_gradient(limit: float) -> None:
    check(lambda g, u: ClampedSwiGLU.apply(g, u, limit), leaf(5, 4), leaf(5, 4))


def test_swiglu_clamps_gate_from_above_only() -> None:
    gate, up = torch.tensor([-9.0, 9.0, 0.5]), torch.tensor([-9.0, 9.0, 0.5])
    silu = torch.nn.functional.silu(torch.tensor([-9.0, 1.0, 0.5]))
    expected = silu * torch.tensor([-1.0, 1.0, 0.5])
    torch.testing.assert_close(ClampedSwiGLU.apply(gate, up, 1.0), expected)


def test_grouped_experts_gradient() -> None:
    counts = [3, 0, 4]
    inputs = (leaf(7, 4), leaf(3, 2, 5, 4), leaf(3, 4, 5), torch.rand(7, dtype=torch.float64))
    inputs[3].requires_grad_()
    rest = (counts, 0.8, UNQUANTISED, EXACT)
    check(lambda x, a, b, w: _GroupedSwiGLU.apply(x, a, b, w, *rest), *inputs)


def test_rows_are_taken_and_summed_by_token() -> None:
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]])
    order = torch.argsort(ids.flatten(), stable=True)
    place = torch.argsort(order)
    x = leaf(3, 2)
    taken = _TakeRows.apply(x, order, place, 2)
    assert torch.equal(taken, x[[0, 2, 1, 2, 0, 1]])
    check(lambda x: _TakeRows.apply(x, order, place, 2), x)
    check(lambda rows: _SumRows.apply(rows, order, place, 2), leaf(6, 2))
    torch.testing.assert_close(_SumRows.apply(taken, order, place, 2), 2 * x)


def test_hyper_connection_gradients() -> None:
    check(lambda h, fn: hc._StreamCoefficients.apply(h, fn, 1e-6), leaf(3, 4, 5), leaf(24, 20))
    check(hc._Collapse.apply, leaf(3, 4, 5), leaf(4, 3))
    check(hc._Merge.apply, leaf(3, 5), leaf(3, 4, 5), leaf(4, 3), leaf(4, 4, 3))
    check(lambda logits: hc._Sinkhorn.apply(logits, 20, 1e-6), leaf(4, 4, 3))


def test_sinkhorn_takes_twenty_column_and_nineteen_row_steps() -> None:
    logits = torch.randn(4, 4, dtype=torch.float64)
    comb = logits.softmax(1) + 1e-6
    comb = comb / (comb.sum(0) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
    ours = hc._Sinkhorn.apply(logits.unsqueeze(-1), 20, 1e-6).squeeze(-1)
    torch.testing.assert_close(ours, comb, rtol=1e-14, atol=0)


def test_merge_sums_over_the_first_index() -> None:
    y, h, post, comb = torch.randn(5), torch.randn(4, 5), torch.randn(4), torch.randn(4, 4)
    ours = hc._Merge.apply(y[None], h[None], post[:, None], comb[..., None])[0]
    torch.testing.assert_close(ours, post[:, None] * y + comb.T @ h)


def dense_attention(
    q: Tensor, kv: Tensor, sink: Tensor, entries: Tensor, selected: Tensor, reach: Reach
) -> Tensor:
    """The definition, one query and one head at a time."""
    out = torch.empty_like(q)
    for b, t, head in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        tokens = kv[b, max(0, t - reach.window + 1) : t + 1]
        seen = [w for w in range((t + 1) // reach.ratio) if selected[b, t, w]]
        keys = torch.cat((tokens, entries[b, seen]))
        scores = keys @ q[b, t, head] * q.size(-1) ** -0.5
        weights = torch.cat((scores, sink[head : head + 1])).softmax(0)[:-1]
        out[b, t, head] = weights @ keys
    return out


def test_attention_equals_its_definition_across_chunks() -> None:
    rows, length, heads, width, ratio = 2, 270, 2, 4, 8
    reach = Reach(window=5, ratio=ratio)
    q, kv = (
        torch.randn(rows, length, heads, width).double(),
        torch.randn(rows, length, width).double(),
    )
    entries = torch.randn(rows, length // ratio, width).double()
    selected = torch.rand(rows, length, length // ratio) < 0.5
    sink = torch.randn(heads).double()
    ours = attend(q, kv, sink, entries, selected, reach=reach)
    torch.testing.assert_close(ours, dense_attention(q, kv, sink, entries, selected, reach))
    everything = torch.ones_like(selected)
    ours = attend(q, kv, sink, entries, reach=reach)
    torch.testing.assert_close(ours, dense_attention(q, kv, sink, entries, everything, reach))


def test_attention_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.models.deepseek_v4.attention_core.QUERY_CHUNK", 4)
    selected = torch.rand(1, 7, 3) < 0.6
    reach = Reach(window=3, ratio=2)
    inputs = (leaf(1, 7, 2, 3), leaf(1, 7, 3), leaf(2), leaf(1, 3, 3))
    check(lambda q, kv, s, e: attend(q, kv, s, e, selected, reach=reach), *inputs)
    check(lambda q, kv, s: attend(q, kv, s, reach=reach), *inputs[:3])


def test_an_entry_is_visible_to_the_query_that_closes_its_block() -> None:
    seen = visible(torch.empty(1, 9, 2), Reach(window=1, ratio=4))
    assert seen[3].tolist() == [True, False]
    assert seen[2].tolist() == [False, False]
    assert seen[7].tolist() == [True, True]


def test_equal_scores_select_the_lower_entry() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert top_mask(scores, 3).tolist() == [
        [True, True, True, False, False],
        [True, True, True, False, False],
    ]


def test_sqrt_softplus_has_finite_gradients_where_it_underflows() -> None:
    logits = torch.tensor([-500.0, -90.0, 0.0, 500.0], requires_grad=True)
    scores = sqrt_softplus(logits)
    scores.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(scores).all()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(scores[:2], torch.nn.functional.softplus(logits[:2]).sqrt())
    assert scores[0] == 0
    torch.testing.assert_close(
        scores[2:], torch.tensor([2.0**0.5 * 0.5887, 500.0**0.5]), rtol=1e-4, atol=0
    )


class _Alone:
    """A vocabulary that one rank holds whole."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    max = sum

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        return labels.unsqueeze(-1), torch.ones_like(labels, dtype=torch.bool)


def test_score_gradient_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.models.deepseek_v4.head.TOKEN_CHUNK", 2)
    labels = torch.tensor([0, 3, 6, 2, 2])
    check(lambda x, w: _Score.apply(x, w, labels, 0.7, _Alone())[0], leaf(5, 4), leaf(7, 4))
    check(lambda x, w: _Score.apply(x, w, labels, 0.7, _Alone())[1], leaf(5, 4), leaf(7, 4))
    check(lambda x, w: sum(_Score.apply(x, w, labels, 0.7, _Alone())), leaf(5, 4), leaf(7, 4))
