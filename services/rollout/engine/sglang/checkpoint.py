"""A folder that an SGLang server can load: config.json and safetensors, for any policy version.

The same folder serves a fresh start, an update from disk, and the way back. On a GPU the server
has DeepSeek-V4 itself and reads the release's config; on a CPU it gets a config that names our
external model, with cache slots as wide as that model needs.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.rollout.engine.sglang.buckets import Bucket, buckets_of
from services.rollout.engine.sglang.spec import CONTEXT_SPARE, Platform
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.weights.dtypes import TORCH_DTYPES

EXTERNAL_CLASS = "TandemDeepseekV4"
_SLOT_WIDTH = 16  # of the external model's cache; its class says the same
_MAX_FILE_BYTES = 2**28  # a server reads several files at once
_WRITERS = 4
_STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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
    with ThreadPoolExecutor(_WRITERS, "folder") as pool:
        writing = [
            pool.submit(_write_file, folder / f"model-{number:05d}.safetensors", bucket)
            for number, bucket in enumerate(buckets_of(tensors, max_bytes=_MAX_FILE_BYTES))
        ]
        for one in writing:
            one.result()
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_file(path: Path, bucket: Bucket) -> None:
    """In the format of https://github.com/huggingface/safetensors#format, straight from where the
    tensors lie: the library copies each one first, and holds up every other thread. The widest come
    first, as the library has them: then each is aligned."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in bucket:
        end, dtype = offset + tensor.nbytes, _STORED_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(body).to_bytes(8, "little") + body)
        for _, tensor in bucket:
            left = tensor.contiguous().flatten().view(torch.uint8).numpy().data
            while left:
                left = left[file.write(left) :]


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
