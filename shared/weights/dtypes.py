"""Torch's types by the names that safetensors and manifests use."""

import torch

from shared.weights.manifest import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
