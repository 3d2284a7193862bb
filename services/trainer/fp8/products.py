"""The three matrix products of a linear layer, forward and backward, behind one seam.

    y = x · Wᵀ        x's gradient = dy · W        W's gradient = dyᵀ · x

`EXACT` computes them in the operands' own dtype; the two FP8 implementations round both operands of
each product first (`emulated.py`, `transformer_engine.py`). A layer that can do either is a
`TakesProducts`; which one it uses is set for the time of a pass.
"""

# T tokens, K input width, N output width
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as exact_linear


class Products(Protocol):
    """Results have the dtype of the first operand and go to `out`, where it is given."""

    def forward(self, x_TK: Tensor, weight_NK: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[T, N]`."""

    def input_gradient(
        self, grad_TN: Tensor, weight_NK: Tensor, *, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """`[T, K]`; `add` adds to what `out` has."""

    def weight_gradient(
        self, grad_TN: Tensor, x_TK: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """`[N, K]`."""


class Exact:
    def forward(self, x_TK: Tensor, weight_NK: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.mm(x_TK, weight_NK.t(), out=out)

    def input_gradient(
        self, grad_TN: Tensor, weight_NK: Tensor, *, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        if out is None:
            return torch.mm(grad_TN, weight_NK)
        return out.addmm_(grad_TN, weight_NK, beta=float(add))

    def weight_gradient(
        self, grad_TN: Tensor, x_TK: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        return torch.mm(grad_TN.t(), x_TK, out=out)


EXACT = Exact()


class TakesProducts:
    """A layer whose products can be computed in FP8."""

    products: Products = EXACT


@contextmanager
def products_as(model: nn.Module, products: Products) -> Iterator[None]:
    """Passes inside compute the products of every such layer with `products`; backward passes use
    what their forward pass did."""
    takers = [module for module in model.modules() if isinstance(module, TakesProducts)]
    try:
        for taker in takers:
            taker.products = products
        yield
    finally:
        for taker in takers:
            taker.products = EXACT


def linear(x: Tensor, weight_NK: Tensor, products: Products) -> Tensor:
    """`x · weightᵀ` of `[…, K]`, differentiable; keeps `x` and the weight as they are."""
    if products is EXACT:
        return exact_linear(x, weight_NK)
    return _Linear.apply(x, weight_NK, products)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.products = products
        return products.forward(_rows(x), weight_NK).view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_NK = ctx.saved_tensors
        grad_TN, grad_x, grad_weight = _rows(gradients[0]), None, None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.products.input_gradient(grad_TN, weight_NK).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.products.weight_gradient(grad_TN, _rows(x)).to(weight_NK.dtype)
        return grad_x, grad_weight, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))
