"""A published version's values, held by the model for the time of a pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from services.trainer.models.deepseek_v4.weights import load_weights, release_tensors
from shared.models.deepseek_v4.checkpoint import dequantise_tensor
from shared.quant.policy import is_scale, scale_name
from shared.weights.dtypes import TORCH_DTYPES
from shared.weights.stored import StoredVersion


@contextmanager
def holding_version(model: nn.Module, folder: Path) -> Iterator[None]:
    """Passes inside run on the values that servers read from `folder`; then the model has its own
    again. ValueError if the folder does not hold a whole version."""
    values = published_values(folder)
    kept = [(weight, weight.clone()) for _, weight in release_tensors(model)]
    try:
        load_weights(model, values)
        yield
    finally:
        with torch.no_grad():
            for weight, own in kept:
                weight.copy_(own)


def published_values(folder: Path) -> Mapping[str, Tensor]:
    """FP32 (or int64) values by release name."""
    stored = StoredVersion.open(folder)
    if stored is None:
        raise ValueError(f"{folder} holds no whole version")
    names = [entry.name for entry in stored.manifest.tensors if not is_scale(entry.name)]
    values = {}
    for name in names:
        scale = _tensor(stored, scale_name(name)) if name.endswith(".weight") else None
        codes = _tensor(stored, name)
        if codes is None:
            raise ValueError(f"{folder}: the shard of {name} is not here")
        values[name] = dequantise_tensor(name, codes, scale=scale)
    return values


def _tensor(stored: StoredVersion, name: str) -> Tensor | None:
    found = stored.tensor(name)
    if found is None:
        return None
    entry, raw = found
    return torch.from_numpy(raw.copy()).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
