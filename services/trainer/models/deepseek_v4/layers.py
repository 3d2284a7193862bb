"""Building blocks of the DeepSeek-V4 actor: replicated and grouped linears, RMS norm, SwiGLU.

Rule: parameters live in `config.params_dtype` unless the release keeps them in FP32; reductions and
non-linearities are computed in FP32 (`wide`), and results return to the activation dtype.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from services.trainer.fp8.products import EXACT, TakesProducts, linear


def wide(x: Tensor) -> Tensor:
    """`x` in FP32, or untouched in FP64 (gradient checks)."""
    return x if x.dtype == torch.float64 else x.float()


def new_parameter(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> Any:
    """A parameter that every tensor-parallel rank holds whole; FP32 ones pass their dtype."""
    weight = nn.Parameter(torch.empty(*shape, dtype=dtype or config.params_dtype))
    if config.perform_initialization:
        config.init_method(weight)
    return weight


def split_parameter(values: Tensor) -> Any:
    """A parameter of which every tensor-parallel rank holds its own part of the first dimension."""
    parameter = nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def freeze(module: nn.Module) -> None:
    """Keep the parameters of `module` out of gradients, buckets and the optimiser."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)


class RMSNorm(nn.Module):
    """`x · rsqrt(mean(x²) + eps) · weight`, in FP32, returned in the input's dtype."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """One pass forward and a closed-form backward; keeps the input and one scalar per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_wide = wide(x)
        scale = inverse_rms(x_wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x_wide * scale).mul_(wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        size = x.size(-1)
        normed = wide(x) * scale
        product = (wide(grad) * normed).view(-1, size)
        grad_weight = product.sum(0)
        along = torch.mv(product, wide(weight)).div_(size).view_as(scale)
        grad_x = (wide(grad) * wide(weight)).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`rsqrt(mean(x²) + eps)` over the last dimension, which is kept."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.size(-1)).add_(eps).rsqrt_()


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """`Σ x·y` over the last dimension (a batched product of single rows is far slower)."""
    return (x * y).sum(-1)


class ReplicatedLinear(TakesProducts, nn.Module):
    """`x · weightᵀ` with a weight that is not sharded. `in_fp32`: widen both sides first, so that
    BF16 weights give FP32 products and sums (the compressor, spec 3.1), whatever others do."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, *, in_fp32: bool = False
    ) -> None:
        super().__init__()
        self.weight = new_parameter(config, output_size, input_size)
        self.in_fp32 = in_fp32

    def forward(self, x: Tensor) -> Tensor:
        if self.in_fp32:
            return linear(wide(x), wide(self.weight), EXACT)
        return linear(x, self.weight, self.products)


class ColumnLinear(TakesProducts, ColumnParallelLinear):
    """Output rows of the weight are shared over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the output."""
        if self.products is EXACT:
            return super().forward(x)[0]
        x = copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        return linear(x, self.weight, self.products)


class RowLinear(TakesProducts, RowParallelLinear):
    """Input columns of the weight are shared over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum over ranks, from each rank's part of the input."""
        if self.products is EXACT:
            return super().forward(x)[0]
        partial = linear(x, self.weight, self.products)
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)


class GroupedColumnLinear(ColumnParallelLinear):
    """Block-diagonal projection: group g of the input meets rows g of the weight only.

    The weight is the release's `[groups · rank, group_width]`; whole groups are sharded over
    tensor-parallel ranks, together with the heads that feed them.
    """

    def __init__(
        self, config: TransformerConfig, *, groups: int, group_width: int, rank: int
    ) -> None:
        super().__init__(
            group_width,
            groups * rank,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
        )
        self.rank = rank

    def forward(self, x_TGC: Tensor) -> Tensor:
        """`[T, local groups, group_width]` -> `[T, local groups · rank]`."""
        weight_GRC = self.weight.view(x_TGC.size(1), self.rank, -1)
        return (
            torch.bmm(x_TGC.transpose(0, 1), weight_GRC.transpose(1, 2)).transpose(0, 1).flatten(1)
        )


class ClampedSwiGLU(torch.autograd.Function):
    """`silu(min(gate, limit)) · clamp(up, ±limit)` of `[T, I]` inputs; `limit` 0 clamps nothing.

    FP32 inside, returned in the dtype of `gate`. Only inputs are kept; backward computes again.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return clamped_swiglu(gate, up, limit).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = swiglu_backward(wide(grad), gate, up, ctx.limit)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), None


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The forward formula, FP32; always a new tensor. The gate is bounded from above only."""
    if limit <= 0:
        return silu(wide(gate)) * wide(up)
    return silu(wide(gate).clamp(max=limit)).mul_(wide(up).clamp(-limit, limit))


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """FP32 gradients of gate and up, zero where a clamp binds."""
    gate, up = wide(gate), wide(up)
    if limit <= 0:
        return torch.ops.aten.silu_backward(grad * up, gate), silu(gate).mul_(grad)
    bounded = gate.clamp(max=limit)
    grad_up = torch.ops.aten.hardtanh_backward(silu(bounded).mul_(grad), up, -limit, limit)
    grad_gate = torch.ops.aten.silu_backward(up.clamp(-limit, limit).mul_(grad), bounded)
    return torch.ops.aten.hardtanh_backward(grad_gate, gate, float("-inf"), limit), grad_up
