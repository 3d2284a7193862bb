"""FP8 products: their operands are those of a slow twin, and so are all three products."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.fp8.emulated import TINY, EmulatedFp8
from services.trainer.fp8.products import EXACT, Products, linear
from services.trainer.models.deepseek_v4.experts import _GroupedSwiGLU
from shared.quant.activation import E4M3_FLOOR, UNQUANTISED, quantise_linear_input
from shared.quant.fp8 import dequantise_fp8, quantise_fp8
from shared.quant.policy import ScaleType
from tests.unit.shared.quant.twins import E4M3_POSITIVE, scale_exponent

TOKENS, IN, OUT = 200, 200, 150  # one whole group and a shorter one of each
SCALES: tuple[ScaleType, ...] = ("e8m0", "fp32")
GRID = np.array([float(value) for value in E4M3_POSITIVE])


def uneven(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    """Values of many orders of magnitude, so that a wrong group shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(3 * torch.randn(shape, generator=generator))
    return torch.randn(shape, generator=generator) * spread * size


X, W, DY = uneven(TOKENS, IN, seed=1), uneven(OUT, IN, seed=2), uneven(TOKENS, OUT, seed=3)


def slow(matrix: Tensor, down: int, across: int, floor: float, scale: ScaleType) -> Tensor:
    """Block after block, each value to the nearest of the grid."""
    values = matrix.double().numpy()
    rounded = np.empty_like(values)
    for top in range(0, values.shape[0], down):
        for left in range(0, values.shape[1], across):
            place = np.s_[top : top + down, left : left + across]
            block = values[place]
            peak = max(floor, float(np.abs(block).max()))
            if scale == "e8m0":
                unit = 2.0 ** scale_exponent(peak, 448)
            else:
                unit = float(np.float32(peak) / np.float32(448))
            rounded[place] = nearest(block / unit) * unit
    return torch.from_numpy(rounded)


def nearest(values: np.ndarray) -> np.ndarray:
    """Of the grid; halfway between two the one at the even place."""
    distance = np.abs(GRID - np.abs(values)[..., None])
    odd_places_lose = np.arange(len(GRID)) % 2
    order = np.where(distance == distance.min(-1, keepdims=True), odd_places_lose, 2)
    return np.copysign(GRID[order.argmin(-1)], values)


def along(matrix: Tensor, floor: float, scale: ScaleType) -> Tensor:
    return slow(matrix, 1, 128, floor, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_each_product_is_that_of_operands_rounded_along_its_sum(scale: ScaleType) -> None:
    products = EmulatedFp8(scale)
    weight = slow(W, 128, 128, TINY, scale)
    x, grad = along(X, E4M3_FLOOR, scale), along(DY, TINY, scale)
    x_columns = along(X.t(), E4M3_FLOOR, scale).t()
    grad_columns = along(DY.t(), TINY, scale)
    near(products.forward(X, W), x @ weight.t())
    near(products.input_gradient(DY, W), grad @ weight)
    near(products.weight_gradient(DY, X), grad_columns @ x_columns)


def near(ours: Tensor, expected: Tensor) -> None:
    """FP32 sums of the very same numbers; a group or a code elsewhere is off by 1e-2."""
    assert ours.shape == expected.shape
    assert (ours - expected).norm() <= 1e-6 * expected.norm()


def test_activations_and_weights_are_rounded_as_the_release_is() -> None:
    ours = EmulatedFp8()
    near(ours.forward(X, torch.eye(IN)), quantise_linear_input(X).double())
    near(ours.forward(torch.eye(IN), W).t(), dequantise_fp8(*quantise_fp8(W)).double())


def test_what_is_on_the_grid_stays_where_it_is() -> None:
    """So an actor that rounds as its sampler is not rounded twice."""
    x, weight = quantise_linear_input(X), dequantise_fp8(*quantise_fp8(W))
    assert torch.equal(EmulatedFp8().forward(x, weight), x @ weight.t())


def test_small_gradients_keep_their_precision() -> None:
    """A floor like that of activations would round them to nothing."""
    grad = DY * 2.0**-60
    exact = EmulatedFp8().input_gradient(DY, W)
    assert torch.equal(EmulatedFp8().input_gradient(grad, W), exact * 2.0**-60)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_products_are_near_the_exact_ones(scale: ScaleType, size: float) -> None:
    x, weight = gaussian(512, 256, seed=1), gaussian(384, 256, seed=2) * size
    grad = gaussian(512, 384, seed=3) * size
    for compute in BY_NAME.values():
        exact, ours = compute(EXACT, x, weight, grad), compute(EmulatedFp8(scale), x, weight, grad)
        error = float((ours - exact).norm() / exact.norm())
        assert 0.01 < error < 0.05  # 2^-4 is the largest of one operand, 0.026 typical


BY_NAME: dict[str, Callable[[Products, Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda p, x, w, g: p.forward(x, w),
    "input_gradient": lambda p, x, w, g: p.input_gradient(g, w),
    "weight_gradient": lambda p, x, w, g: p.weight_gradient(g, x),
}


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("products", [EXACT, EmulatedFp8()], ids=["exact", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_go_where_they_are_wanted(products: Products, dtype: torch.dtype) -> None:
    x, weight, grad = X.to(dtype), W.to(dtype), DY.to(dtype)
    for compute, shape in (
        (lambda out: products.forward(x, weight, out=out), (TOKENS, OUT)),
        (lambda out: products.input_gradient(grad, weight, out=out), (TOKENS, IN)),
        (lambda out: products.weight_gradient(grad, x, out=out), (OUT, IN)),
    ):
        given = torch.full(shape, 7.0, dtype=dtype)
        expected = compute(None)
        assert compute(given) is given
        assert expected.dtype == dtype
        assert torch.equal(given, expected)
    total = torch.full((TOKENS, IN), 2.0**40, dtype=dtype)
    products.input_gradient(grad, weight, out=total, add=True)
    expected = products.input_gradient(grad, weight).double()
    assert (total.double() - 2.0**40 - expected).norm() <= 0.01 * 2.0**40 * TOKENS


def test_a_linear_layer_differentiates_through_the_three_products() -> None:
    products = EmulatedFp8()
    x, weight = X.view(2, TOKENS // 2, IN).clone().requires_grad_(), W.clone().requires_grad_()
    y = linear(x, weight, products)
    y.backward(DY.view(2, TOKENS // 2, OUT))
    assert torch.equal(y.detach().view(TOKENS, OUT), products.forward(X, W))
    assert x.grad is not None
    assert torch.equal(x.grad.view(TOKENS, IN), products.input_gradient(DY, W))
    assert weight.grad is not None
    assert torch.equal(weight.grad, products.weight_gradient(DY, X))


def test_frozen_weights_get_no_gradient() -> None:
    x = X.clone().requires_grad_()
    linear(x, W, EmulatedFp8()).sum().backward()
    assert x.grad is not None
    assert W.grad is None


def test_experts_are_made_of_the_same_products() -> None:
    """Against each expert by itself, made of linear layers; rows in groups of their own expert."""
    products, counts, inner = EmulatedFp8(), [150, 0, 131], 96
    rows, width = sum(counts), 144
    leaves = [
        gaussian(rows, width, seed=1),
        gaussian(3, 2, inner, width, seed=2) * 0.1,
        gaussian(3, width, inner, seed=3) * 0.1,
        gaussian(rows, seed=4).abs(),
    ]
    cotangent = gaussian(rows, width, seed=5)

    def gradients(compute: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        result = compute(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs, cotangent)]

    def ours(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Any:
        return _GroupedSwiGLU.apply(x, w13, w2, weights, counts, 0.8, UNQUANTISED, products)

    def apart(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        parts, start = [], 0
        for expert, count in enumerate(counts):
            mine = slice(start, start + count)
            gate = linear(x[mine], w13[expert, 0], products).clamp(max=0.8)
            up = linear(x[mine], w13[expert, 1], products).clamp(-0.8, 0.8)
            hidden = torch.nn.functional.silu(gate) * up
            parts.append(linear(hidden * weights[mine, None], w2[expert], products))
            start += count
        return torch.cat(parts)

    for mine, expected in zip(gradients(ours), gradients(apart), strict=True):
        # A last bit of the hidden vector that rounds to another code moves few values.
        assert (mine - expected).norm() <= 2e-3 * expected.norm()
