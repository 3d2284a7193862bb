"""A folder that an SGLang server can load: config.json and safetensors, for any policy version.

The same folder serves a fresh start, an update from disk, and the way back. On a GPU the server
has DeepSeek-V4 itself and reads the release's config; on a CPU it gets a config that names our
external model, with cache slots as wide as that model needs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.rollout.engine.sglang.spec import CONTEXT_SPARE, Platform
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release

EXTERNAL_CLASS = "TandemDeepseekV4"
_SLOT_WIDTH = 16  # of the external model's cache; its class says the same
_MAX_FILE_BYTES = 2**31


def server_config(
    arch: Architecture, platform: Platform, *, context_length: int, quantise_activations: bool
) -> dict[str, Any]:
    """What config.json says to the server."""
    config = arch.to_config()
    if platform != "cpu":
        # Only a request's own stop tokens end a sample; the server would add the config's.
        return config | {"eos_token_id": None}
    return {
        "architectures": [EXTERNAL_CLASS],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": _SLOT_WIDTH,
        "head_dim": _SLOT_WIDTH,
        "intermediate_size": _SLOT_WIDTH,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": context_length + CONTEXT_SPARE,  # as it is started with
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "tandem": {"config": config, "quantise_activations": quantise_activations},
    }


def first_tensors(checkpoint: Path, arch: Architecture) -> dict[str, Tensor]:
    """Canonical tensors of a release, in the format of `arch`."""
    stored = load_release(checkpoint)
    if arch.weight_format == Architecture.load(checkpoint).weight_format:
        return stored
    if arch.weight_format != "fp32":
        raise ValueError(f"{checkpoint} is not stored as {arch.weight_format}")
    return dequantised(stored)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Fill `folder`, which is made; the config comes last, so that half a folder loads nowhere."""
    folder.mkdir(parents=True)
    part: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > _MAX_FILE_BYTES:
            save_file(part, folder / f"model-{number:05d}.safetensors")
            part, size, number = {}, 0, number + 1
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    save_file(part, folder / f"model-{number:05d}.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, by release name."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    """As SGLang's update endpoints spell it."""
    return str(dtype).removeprefix("torch.")
