"""One weight from the format that it is stored in to the format that is wanted.

What needs no rounding is not rounded: equal formats are copied byte by byte, FP4 becomes FP8 by
shifting exponents. Everything else goes through FP32 values and the one shared quantiser.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.models.deepseek_v4.checkpoint import dequantise_tensor, quantise_tensor
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.quant.fp4 import fp4_to_fp8
from shared.quant.fp8 import scale_values
from shared.quant.policy import Format, Policy, format_of, scale_name

_FORMATS: dict[torch.dtype, Format] = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "fp4",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "int64",
}
_SCALES = {"e8m0": torch.float8_e8m0fnu, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight as a checkpoint has it: codes and scales, or values."""

    tensor: Tensor
    scale: Tensor | None = None


def recast(name: str, stored: Stored, *, policy: Policy) -> dict[str, Tensor]:
    """{name: codes or values, its .scale: scales} in the policy's format.

    ValueError names the tensor if it is not finite or BF16 cannot hold its codes' values, or the
    block that FP8 cannot hold exactly.
    """
    found, wanted = _FORMATS[stored.tensor.dtype], format_of(name, policy)
    if (found == "int64") != (wanted == "int64"):
        raise CheckpointInvalid(f"{name}: expected {wanted}, found {found}")
    if found in ("fp8", "fp4") and stored.scale is None:
        raise CheckpointInvalid(f"{name}: expected a scale for {found}, found none")
    if found == wanted and stored.scale is not None:
        dequantise_tensor(name, stored.tensor, scale=stored.scale)  # refuses what is not finite
        return _with_scale(name, stored.tensor, stored.scale, policy)
    if (found, wanted) == ("fp4", "fp8") and stored.scale is not None:
        codes, scale = fp4_to_fp8(stored.tensor, stored.scale, name=name)
        return _with_scale(name, codes, scale, policy)
    values = dequantise_tensor(name, stored.tensor, scale=stored.scale)
    made = quantise_tensor(name, values, policy=policy)
    is_exact = stored.scale is not None and stored.scale.dtype == _SCALES["e8m0"]
    if is_exact and wanted == "bf16" and not torch.equal(made[name].float(), values):
        raise CheckpointInvalid(f"{name}: has bits below 2^-133, which BF16 cannot hold")
    return made


def _with_scale(name: str, codes: Tensor, scale: Tensor, policy: Policy) -> dict[str, Tensor]:
    dtype = _SCALES[policy.scale]
    # FP4 scales are E8M0 in every release.
    if codes.dtype == torch.float8_e4m3fn and scale.dtype != dtype:
        values = scale_values(scale, name=name)
        scale = values.to(dtype)
        if not torch.equal(scale.float(), values):
            raise CheckpointInvalid(f"{name}: has scales that are no powers of two")
    return {name: codes, scale_name(name): scale}
