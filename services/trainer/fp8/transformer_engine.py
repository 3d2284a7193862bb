"""FP8 products by TransformerEngine: its block-scaled quantiser and matrix product, nothing else.

The rounding is that of `emulated.py`: E4M3, 1x128 along the sum for activations and gradients,
128x128 for weights. Its kernels want whole blocks, so operands are padded with zeros, which add
nothing. Written for its calls since 2.10, which take no workspace; needs Hopper or newer. See
`Float8BlockScaling` in TransformerEngine's `common/recipe`.
"""

# T tokens, K input width, N output width
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from shared.quant.activation import E4M3_FLOOR
from shared.quant.fp8 import BLOCK
from shared.quant.policy import ScaleType

OLDEST = (2, 10)


@dataclass(frozen=True, slots=True)
class TransformerEngineFp8:
    """Quantisers of each operand, by what is summed over: the width (`rows`) or the tokens
    (`columns`); square blocks of a weight serve both. `multiply` is `general_gemm`."""

    multiply: Any
    x_rows: Any
    x_columns: Any
    grad_rows: Any
    grad_columns: Any
    weight: Any

    def forward(self, x_TK: Tensor, weight_NK: Tensor, *, out: Tensor | None = None) -> Tensor:
        weight, x = self.weight(_whole(weight_NK)), self.x_rows(_whole(x_TK))
        return self._product(weight, x, "TN", (len(x_TK), len(weight_NK)), x_TK, out)

    def input_gradient(
        self, grad_TN: Tensor, weight_NK: Tensor, *, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        weight, grad = self.weight(_whole(weight_NK)), self.grad_rows(_whole(grad_TN))
        shape = (len(grad_TN), weight_NK.size(1))
        if add and out is not None:
            return out.add_(self._product(weight, grad, "NN", shape, grad_TN, None))
        return self._product(weight, grad, "NN", shape, grad_TN, out)

    def weight_gradient(
        self, grad_TN: Tensor, x_TK: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        x, grad = self.x_columns(_whole(x_TK)), self.grad_columns(_whole(grad_TN))
        return self._product(x, grad, "NT", (grad_TN.size(1), x_TK.size(1)), grad_TN, out)

    def _product(
        self, a: Any, b: Any, layout: str, shape: tuple[int, int], like: Tensor, out: Tensor | None
    ) -> Tensor:
        """`b · a` in row-major terms, without the padding; FP32 sums, in the dtype of `like`."""
        result, *_ = self.multiply(
            a, b, out_dtype=like.dtype, layout=layout, use_split_accumulator=True
        )
        result = result[: shape[0], : shape[1]]
        return result if out is None else out.copy_(result)


def load(scale: ScaleType) -> TransformerEngineFp8:
    """ValueError where it is not installed, too old, or without support of this GPU."""
    try:
        found = version("transformer_engine")
    except PackageNotFoundError as err:
        raise ValueError(
            "actor.kernels.linear 'transformer_engine': TransformerEngine is not installed here"
        ) from err
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(
            f"actor.kernels.linear 'transformer_engine' needs TransformerEngine {oldest} or newer, "
            f"found {found}"
        )
    pytorch = _loaded()
    works, reason = pytorch.is_fp8_block_scaling_available(return_reason=True)
    if not works:
        raise ValueError(f"actor.kernels.linear 'transformer_engine': {reason}")
    e4m3 = import_module("transformer_engine_torch").DType.kFloat8E4M3

    def quantiser(*, rows: bool, columns: bool, dims: int, floor: float = 0.0) -> Any:
        return pytorch.Float8BlockQuantizer(
            e4m3,
            rowwise=rows,
            columnwise=columns,
            amax_epsilon=floor,
            force_pow_2_scales=scale == "e8m0",
            block_scaling_dim=dims,
        )

    return TransformerEngineFp8(
        multiply=import_module("transformer_engine.pytorch.cpp_extensions").general_gemm,
        x_rows=quantiser(rows=True, columns=False, dims=1, floor=E4M3_FLOOR),
        x_columns=quantiser(rows=False, columns=True, dims=1, floor=E4M3_FLOOR),
        grad_rows=quantiser(rows=True, columns=False, dims=1),
        grad_columns=quantiser(rows=False, columns=True, dims=1),
        weight=quantiser(rows=True, columns=True, dims=2),
    )


def _loaded() -> Any:
    """Its parts are packages of their own: one may be missing, or made for another CUDA."""
    try:
        return import_module("transformer_engine.pytorch")
    except (ImportError, OSError, AssertionError, RuntimeError) as err:
        raise ValueError(
            f"actor.kernels.linear 'transformer_engine': TransformerEngine cannot be loaded: {err}"
        ) from err


def _whole(matrix: Tensor) -> Tensor:
    """Padded with zeros to whole blocks."""
    rows, columns = (-size % BLOCK for size in matrix.shape)
    padded = pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix
    return padded.contiguous()
