"""Mixture of experts: route, gather each expert's tokens, clamped SwiGLU, weighted sum in FP32.

All experts of a rank live in two stacked tensors and run through one autograd function, so the
number of operations does not grow with layers of glue; rows are sorted by expert and restored by
index, which keeps every sum in a fixed order.
"""

# T tokens, D model width, E local experts, I inner width, k experts per token, M = T·k routed rows
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from services.trainer.fp8.products import Products, TakesProducts
from services.trainer.models.deepseek_v4.activations import linear_input
from services.trainer.models.deepseek_v4.dispatch import Dispatch, all_tokens, own_tokens
from services.trainer.models.deepseek_v4.layers import (
    ClampedSwiGLU,
    ColumnLinear,
    RowLinear,
    clamped_swiglu,
    new_parameter,
    row_dots,
    swiglu_backward,
    wide,
)
from services.trainer.models.deepseek_v4.router import Router
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import ActivationQuant


class MixtureOfExperts(nn.Module):
    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, layer: int
    ) -> None:
        super().__init__()
        self.gate = Router(config, architecture, layer=layer)
        self.experts = RoutedExperts(config, architecture)
        self.shared_experts = SharedExpert(config, architecture)

    def forward(
        self,
        x_TD: Tensor,
        token_ids_T: Tensor,
        routes: Routes,
        trace: Trace,
        quant: ActivationQuant,
    ) -> Tensor:
        ids_Tk, weights_Tk = self.gate(x_TD, token_ids_T, routes)
        if trace.states is not None:
            dense_TE = weights_Tk.new_zeros(x_TD.size(0), self.gate.weight.size(0))
            trace.flat("router", dense_TE.scatter(1, ids_Tk, weights_Tk))
        rounded_TD = linear_input(x_TD, quant)
        routed_TD = trace.flat("experts", self.experts(rounded_TD, ids_Tk, weights_Tk, quant))
        shared_TD = trace.flat("shared_experts", self.shared_experts(rounded_TD, quant))
        return (routed_TD + wide(shared_TD)).to(x_TD.dtype)


class SharedExpert(nn.Module):
    """The expert that every token passes; whether it is clamped is the architecture's flag."""

    def __init__(self, config: TransformerConfig, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        inner = a.moe_intermediate_size * a.n_shared_experts
        self.w1 = ColumnLinear(config, a.hidden_size, inner)
        self.w3 = ColumnLinear(config, a.hidden_size, inner)
        self.w2 = RowLinear(config, inner, a.hidden_size)
        self.limit = a.swiglu_limit if a.clamp_shared_experts else 0.0

    def forward(self, x_TD: Tensor, quant: ActivationQuant) -> Tensor:
        """`x` comes rounded."""
        hidden = ClampedSwiGLU.apply(self.w1(x_TD), self.w3(x_TD), self.limit)
        return self.w2(linear_input(hidden, quant))


class RoutedExperts(TakesProducts, nn.Module):
    """Gate and up rows of all local experts in `w13 [E, 2, I, D]`, down rows in `w2 [E, D, I]`.

    I is this rank's part of the inner width. Tensor-parallel ranks, which hold the same tokens,
    route a part of them each.
    """

    def __init__(self, config: TransformerConfig, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.num_global = a.n_routed_experts
        self.num_experts = a.n_routed_experts // config.expert_model_parallel_size
        inner = a.moe_intermediate_size // config.expert_tensor_parallel_size
        self.w13 = new_parameter(config, self.num_experts, 2, inner, a.hidden_size)
        self.w2 = new_parameter(config, self.num_experts, a.hidden_size, inner)
        for weight in (self.w13, self.w2):
            # Megatron reduces these over expert-data-parallel ranks, whatever the layout, so that
            # every layout's checkpoint has the same parts; and no rank holds a duplicate.
            weight.allreduce = False
            weight.tensor_model_parallel, weight.partition_dim = True, 2
        self.limit = a.swiglu_limit

    def forward(
        self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, quant: ActivationQuant
    ) -> Tensor:
        """-> `[T, D]` FP32: the weighted sum over each token's experts. `x` comes rounded."""
        x_TD, ids_Tk, weights_Tk = own_tokens(x_TD), own_tokens(ids_Tk), own_tokens(weights_Tk)
        flat = ids_Tk.flatten()
        order_M = torch.argsort(flat, stable=True)
        place_M = torch.empty_like(order_M)
        place_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
        dispatch = Dispatch(
            torch.bincount(flat, minlength=self.num_global), num_local=self.num_experts
        )
        rows_MD = _TakeRows.apply(x_TD, order_M, place_M, ids_Tk.size(1))
        weights_M = weights_Tk.flatten()[order_M]
        out_ND = _GroupedSwiGLU.apply(
            dispatch.to_experts(rows_MD),
            self.w13,
            self.w2,
            dispatch.to_experts(weights_M.unsqueeze(1)).squeeze(1),
            dispatch.counts,
            self.limit,
            quant,
            self.products,
        )
        out_MD = dispatch.from_experts(out_ND)
        return all_tokens(_SumRows.apply(out_MD, order_M, place_M, ids_Tk.size(1)))


def _sum_by_token(rows_MD: Tensor, place_M: Tensor, k: int) -> Tensor:
    return wide(rows_MD.index_select(0, place_M).view(-1, k, rows_MD.size(1))).sum(1)


class _TakeRows(torch.autograd.Function):
    """Row m is token `order[m] // k`; backward sums a token's k rows in slot order, in FP32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_M: Tensor, place_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.k = k
        return x_TD.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_M,) = ctx.saved_tensors
        return _sum_by_token(grad_MD, place_M, ctx.k).to(grad_MD.dtype), None, None, None


class _SumRows(torch.autograd.Function):
    """The reverse of `_TakeRows`: token t gets the FP32 sum of its k rows."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor, place_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_M)
        ctx.k, ctx.dtype = k, rows_MD.dtype
        return _sum_by_token(rows_MD, place_M, k)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        (order_M,) = ctx.saved_tensors
        grad = grad_TD.to(ctx.dtype).index_select(0, order_M // ctx.k)
        return grad, None, None, None


class _GroupedSwiGLU(torch.autograd.Function):
    """Every expert's clamped SwiGLU on its own rows, which are sorted; `counts` says how many.

    The routing weight multiplies the hidden vector before w2, as in the official code. Keeps the
    rows and the gate/up products; hidden vectors are recomputed backward. One expert at a time, so
    that its rows stay in the cache between the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        w13: Tensor,
        w2: Tensor,
        weights_M: Tensor,
        counts: list[int],
        limit: float,
        quant: ActivationQuant,
        products: Products,
    ) -> Tensor:
        gate_MI = rows_MD.new_empty(rows_MD.size(0), w2.size(2))
        up_MI, out_MD = torch.empty_like(gate_MI), torch.empty_like(rows_MD)
        for expert, rows in _spans(counts):
            x, gate, up = rows_MD[rows], gate_MI[rows], up_MI[rows]
            products.forward(x, w13[expert, 0], out=gate)
            products.forward(x, w13[expert, 1], out=up)
            hidden = clamped_swiglu(gate, up, limit).mul_(weights_M[rows].unsqueeze(-1))
            hidden = linear_input(hidden.to(x.dtype), quant)
            products.forward(hidden, w2[expert], out=out_MD[rows])
        ctx.save_for_backward(rows_MD, w13, w2, weights_M, gate_MI, up_MI)
        ctx.counts, ctx.limit, ctx.quant, ctx.products = counts, limit, quant, products
        return out_MD

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, w13, w2, weights_M, gate_MI, up_MI = ctx.saved_tensors
        grad_rows, grad_weights = torch.empty_like(rows_MD), torch.empty_like(weights_M)
        grad_w13, grad_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
        products: Products = ctx.products
        for expert, rows in _spans(ctx.counts):
            x, grad, gate, up = rows_MD[rows], grad_MD[rows], gate_MI[rows], up_MI[rows]
            weight = weights_M[rows].unsqueeze(-1)
            hidden = clamped_swiglu(gate, up, ctx.limit)
            grad_hidden = wide(products.input_gradient(grad, w2[expert]))
            grad_weights[rows] = row_dots(grad_hidden, hidden)
            hidden = linear_input(hidden.mul_(weight).to(x.dtype), ctx.quant)
            products.weight_gradient(grad, hidden, out=grad_w2[expert])
            grads = swiglu_backward(grad_hidden.mul_(weight), gate, up, ctx.limit)
            for part, grad_part in enumerate(grads):
                grad_part = grad_part.to(x.dtype)
                products.weight_gradient(grad_part, x, out=grad_w13[expert, part])
                products.input_gradient(
                    grad_part, w13[expert, part], out=grad_rows[rows], add=part == 1
                )
        return grad_rows, grad_w13, grad_w2, grad_weights, None, None, None, None


def _spans(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for the experts that have any."""
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, slice(start, start + count)))
        start += count
    return spans
