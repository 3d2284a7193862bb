"""The calls to TransformerEngine, against a stand-in that does what its documentation says.

It is not installed here (it compiles against CUDA): what is checked is which operand is rounded in
which direction, what each product is asked for, and that all of it comes to the emulation's values.
"""

import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from services.trainer.fp8 import transformer_engine
from services.trainer.fp8.choice import training_products
from services.trainer.fp8.emulated import EmulatedFp8, plain_round_e4m3
from services.trainer.fp8.products import EXACT, Products
from services.trainer.jobs.abilities import lacking
from shared.job_actor import ActorSection
from shared.quant.policy import ScaleType
from tests.unit.shared.test_job_cluster import make_job

ENGINE = {
    "precision": "fp8",
    "dtype": "bfloat16",
    "kernels": {"linear": "transformer_engine"},
}


class Quantised:
    """Values as one product may read them: `rows` rounded along the last dimension, `columns` along
    the first; None if nobody asked for that direction."""

    def __init__(self, rows: Tensor | None, columns: Tensor | None) -> None:
        self.rows, self.columns = rows, columns


class Float8BlockQuantizer:
    """Signature and meaning of TransformerEngine's."""

    def __init__(
        self,
        fp8_dtype: str,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        assert fp8_dtype == "e4m3"
        assert block_scaling_dim == 1 or rowwise, "square blocks always write rows"
        self.rowwise, self.columnwise = rowwise, columnwise
        self.floor = max(amax_epsilon, 2.0**-100)
        self.scale: ScaleType = "e8m0" if force_pow_2_scales else "fp32"
        self.square = block_scaling_dim == 2

    def __call__(self, x: Tensor) -> Quantised:
        assert not any(size % 128 for size in x.shape), "unaligned"
        assert x.is_contiguous()
        rows = self._round(x.float()) if self.rowwise else None
        columns = self._round(x.float().t()).t() if self.columnwise else None
        return Quantised(rows, columns)

    def _round(self, x: Tensor) -> Tensor:
        down = 128 if self.square else 1
        blocks = x.reshape(x.size(0) // down, down, x.size(1) // 128, 128)
        args = {"floor": self.floor, "scale": self.scale}
        return plain_round_e4m3(blocks, dims=(1, 3), **args).reshape(x.shape)


def general_gemm(
    A: Quantised,
    B: Quantised,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    use_split_accumulator: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Column-major, as BLAS: of row-major A and B the result is `op(B) · op(A)`."""
    assert use_split_accumulator, "sums of block-scaled products are FP32"
    a = A.rows if layout[0] == "T" else A.columns
    b = B.columns if layout[1] == "T" else B.rows
    assert a is not None, "A was not rounded along what is summed"
    assert b is not None, "B was not rounded along what is summed"
    result = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
    return result.to(out_dtype), None, None, None


def installed(monkeypatch: pytest.MonkeyPatch, *, found: str, works: bool = True) -> None:
    """As if `found` was the version of an installed TransformerEngine."""

    def is_available(*, return_reason: bool) -> tuple[bool, str]:
        return works, "" if works else "needs compute capability 9.0"

    parts: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "Float8BlockQuantizer": Float8BlockQuantizer,
            "is_fp8_block_scaling_available": is_available,
        },
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine_torch": {"DType": SimpleNamespace(kFloat8E4M3="e4m3")},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def version(name: str) -> str:
        return found if name == "transformer_engine" else metadata.version(name)

    monkeypatch.setattr(transformer_engine, "version", version)


def operand(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * spread).bfloat16()


@pytest.mark.parametrize("scale", ["e8m0", "fp32"])
@pytest.mark.parametrize("sizes", [(128, 256, 128), (150, 200, 72)])
def test_its_products_are_those_of_the_emulation(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], scale: ScaleType
) -> None:
    installed(monkeypatch, found="2.10.0")
    theirs = training_products(ActorSection.model_validate(ENGINE), scale)
    tokens, width, outputs = sizes
    x, weight = operand(tokens, width, seed=1), operand(outputs, width, seed=2)
    grad, total = operand(tokens, outputs, seed=3), operand(tokens, width, seed=4)
    computed: list[Callable[[Products], Tensor]] = [
        lambda products: products.forward(x, weight),
        lambda products: products.forward(x, weight, out=grad.clone()),
        lambda products: products.input_gradient(grad, weight),
        lambda products: products.input_gradient(grad, weight, out=total.clone(), add=True),
        lambda products: products.weight_gradient(grad, x),
        lambda products: products.weight_gradient(grad, x, out=weight.clone()),
    ]
    for compute in computed:
        ours, expected = compute(theirs), compute(EmulatedFp8(scale))
        assert ours.dtype == expected.dtype == torch.bfloat16
        assert ours.shape == expected.shape
        assert (ours - expected).norm() <= 2**-8 * expected.norm()  # a last bit of BF16


def test_without_it_ranks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ActorSection.model_validate(ENGINE)
    with pytest.raises(ValueError, match="TransformerEngine is not installed here"):
        training_products(asked, "e8m0")
    installed(monkeypatch, found="2.9.1+cu13")
    with pytest.raises(ValueError, match=r"needs TransformerEngine 2\.10 or newer, found 2\.9\.1"):
        training_products(asked, "e8m0")
    installed(monkeypatch, found="2.11.0")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ValueError, match="TransformerEngine cannot be loaded: import of transf"):
        training_products(asked, "e8m0")
    installed(monkeypatch, found="2.11.0", works=False)
    with pytest.raises(ValueError, match=r"needs compute capability 9\.0"):
        training_products(asked, "e8m0")


def test_without_it_a_job_is_refused_at_submission() -> None:
    ((key, value, reason),) = lacking(make_job(actor=ENGINE))
    assert (key, value) == ("actor.kernels.linear", "transformer_engine")
    assert "not installed" in reason
    assert lacking(make_job(actor={"precision": "fp8"})) == []


@pytest.mark.parametrize(
    ("actor", "complaint"),
    [
        (ENGINE | {"precision": "dtype"}, "precision 'dtype' with dtype 'bfloat16' is no known"),
        (ENGINE | {"dtype": "float32"}, "precision 'fp8' with dtype 'float32' is no known mix"),
        (
            {"precision": "fp8", "kernels": {"experts": "triton"}},
            "precision 'fp8' with kernels.experts 'triton' is no known mix",
        ),
        ({"precision": "fp4"}, "'dtype' or 'fp8'"),
        ({"kernels": {"linear": "triton"}}, "'torch' or 'transformer_engine'"),
    ],
)
def test_unknown_mixes_are_refused(actor: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ActorSection.model_validate(actor)


def test_a_job_that_asks_for_nothing_has_exact_products() -> None:
    assert training_products(ActorSection(), "e8m0") is EXACT
    emulated = training_products(ActorSection(precision="fp8"), "fp32")
    assert emulated == EmulatedFp8("fp32")
