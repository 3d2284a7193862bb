"""Read and write a release directory: config.json, safetensors in release names, tokenizer.

Everything is checked against the architecture's table before a byte of weights is used, and
`quantise_tensor` is the one way from values to stored bytes: this file, the converters and the
online publisher all call it, so they agree to the byte.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.headers import (
    INDEX_FILE,
    CheckpointInvalid,
    StoredTensor,
    read_headers,
)
from shared.models.deepseek_v4.names import TensorSpec, tensor_specs
from shared.quant.fp4 import dequantise_fp4, quantise_fp4
from shared.quant.fp8 import dequantise_fp8, quantise_fp8
from shared.quant.policy import POLICIES, Policy, format_of, is_scale, scale_name, weight_class

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
DEFAULT_SHARD_BYTES = 4 << 30

_STORED: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "I8",  # some repackages call the two FP4 codes of a byte unsigned
    torch.int64: "I64",
}
_SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Release:
    """A checked release directory whose tensors are read one by one."""

    path: Path
    arch: Architecture
    policy: Policy
    specs: dict[str, TensorSpec]
    stored: dict[str, StoredTensor]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Stored tensors (codes, scales, values), file by file: memory for one at a time."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.stored[name].file, []).append(name)
        for file, wanted in by_file.items():
            for name, tensor in _tensors(file, wanted):
                check_table(name, tensor, self.arch)
                _check_values(name, tensor)
                yield name, tensor


def load_release(path: str | Path, arch: Architecture | None = None) -> dict[str, Tensor]:
    """Every stored tensor by release name, exactly as on disk; CheckpointInvalid if one is off."""
    release = open_release(path, arch)
    return dict(release.read(release.specs))


def dequantised(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FP32 values by release name, scales folded in; `tid2eid` stays an integer table."""
    return {
        name: dequantise_tensor(name, tensor, scale=state.get(_scale_of(name)))
        for name, tensor in state.items()
        if not is_scale(name)
    }


def write_release(
    path: str | Path,
    arch: Architecture,
    state: Mapping[str, Tensor],
    *,
    policy: Policy | None = None,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Quantise `state` (values by release name) and write it; the directory appears whole.

    The format is the architecture's. Only one shard is in memory if `state` makes its tensors on
    demand. An existing directory is a FileExistsError unless `overwrite`.
    """
    chosen = policy or POLICIES[arch.weight_format]
    specs = tensor_specs(arch, policy=chosen)
    _check_weights(state, specs, arch)
    with _directory_in_one_step(Path(path), overwrite=overwrite) as folder:
        _write_shards(folder, specs, state, chosen, shard_bytes)
        (folder / CONFIG_FILE).write_text(json.dumps(arch.to_config(), indent=2) + "\n")
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), folder)


def quantise_tensor(name: str, tensor: Tensor, *, policy: Policy) -> dict[str, Tensor]:
    """What a release stores for one tensor of values: {name: codes, its .scale: scales}.

    `tensor` is FP32 (or anything exact in FP32); NaN and infinity are refused with the name.
    """
    match format_of(name, policy):
        case "fp8":
            dtype = _SCALE_DTYPES[policy.scale]
            codes, scale = quantise_fp8(tensor, name=name, scale_dtype=dtype)
            return {name: codes, scale_name(name): scale}
        case "fp4":
            codes, scale = quantise_fp4(tensor, name=name)
            return {name: codes, scale_name(name): scale}
        case "bf16":
            return {name: _finite(name, tensor.to(torch.bfloat16))}
        case "fp32":
            return {name: _finite(name, tensor.float())}
        case "int64":
            return {name: _integers(name, tensor)}


def dequantise_tensor(name: str, tensor: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """FP32 values of one stored tensor; `scale` is its ``.scale`` if it has one."""
    if tensor.dtype == torch.int64:
        return tensor
    if tensor.dtype in (torch.float32, torch.bfloat16):
        return tensor.float()
    if scale is None:
        raise CheckpointInvalid(f"{name}: expected a scale for {tensor.dtype}, found none")
    if tensor.dtype == torch.float8_e4m3fn:
        return dequantise_fp8(tensor, scale, name=name)
    if tensor.dtype in (torch.int8, torch.uint8):
        return dequantise_fp4(tensor, scale, name=name)
    raise CheckpointInvalid(f"{name}: expected a release dtype, found {tensor.dtype}")


def check_stored(state: Mapping[str, Tensor], arch: Architecture) -> None:
    """CheckpointInvalid unless `state` is every stored tensor of `arch` and nothing else."""
    found = {
        name: (_STORED.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in state.items()
    }
    check_headers(found, arch, where="weights")
    for name, tensor in state.items():
        check_table(name, tensor, arch)


def check_headers(
    found: Mapping[str, tuple[str, tuple[int, ...]]], arch: Architecture, *, where: str
) -> Policy:
    """The formats in use; CheckpointInvalid unless `found` (dtype, shape) is all of `arch`."""
    policy = _probed_policy(arch, {name: dtype for name, (dtype, _) in found.items()})
    specs = tensor_specs(arch, policy=policy).values()
    compare_tensors({spec.name: (spec.dtype, spec.shape) for spec in specs}, found, where=where)
    return policy


def open_release(path: str | Path, arch: Architecture | None = None) -> Release:
    """Check a directory's headers against the architecture (its own config.json by default).

    Experts may be FP8 or FP4 and scales E8M0 or FP32: that is read from the files, because
    repackaged releases keep stale configs.
    """
    folder = Path(path)
    arch = arch or Architecture.load(folder)
    stored = read_headers(folder)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    policy = check_headers(found, arch, where=str(folder))
    specs = tensor_specs(arch, policy=policy)
    if policy.expert in ("fp8", "fp4") and arch.weight_format != policy.expert:
        arch = arch.with_format(policy.expert)
    return Release(folder, arch, policy, specs, stored)


def _tensors(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)
    except SafetensorError as err:  # of bytes between or behind the tensors, or gone since
        raise CheckpointInvalid(f"{file}: {err}") from err


def _probed_policy(arch: Architecture, dtypes: Mapping[str, str]) -> Policy:
    policy = POLICIES[arch.weight_format]
    if arch.quantization_config is None:
        return policy
    expert = dtypes.get("layers.0.ffn.experts.0.w1.weight")
    if expert == "I8":
        policy = replace(policy, expert="fp4")
    elif expert == "F8_E4M3":
        policy = replace(policy, expert="fp8")
    if dtypes.get("layers.0.attn.wq_a.scale") == "F32":
        policy = replace(policy, scale="fp32")
    return policy


def compare_tensors(
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    where: str,
) -> None:
    """CheckpointInvalid on the first (dtype, shape) that differs, is missing or is too much."""
    problems = []
    for name, kind in expected.items():
        if name not in found:
            problems.append(f"{name}: expected {_text(kind)}, found no such tensor")
        elif found[name] != kind:
            problems.append(f"{name}: expected {_text(kind)}, found {_text(found[name])}")
    problems += [
        f"{name}: expected no such tensor, found {_text(found[name])}"
        for name in sorted(found.keys() - expected.keys())
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointInvalid(f"{where}: {problems[0]}{more}")


def _text(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]} {list(kind[1])}"


def check_table(name: str, tensor: Tensor, arch: Architecture) -> None:
    """CheckpointInvalid if `name` is an integer table with a row that is no choice of experts."""
    if is_scale(name) or weight_class(name) != "table":
        return
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= arch.n_routed_experts:
        bound = f"expert ids in [0, {arch.n_routed_experts})"
        raise CheckpointInvalid(f"{name}: expected {bound}, found {low} to {high}")
    if tensor.is_floating_point():
        return  # whoever stores it says so
    ordered = tensor.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if twice.any():
        row = int(twice.nonzero()[0])
        found = tensor[row].tolist()
        raise CheckpointInvalid(f"{name}: expected distinct experts in row {row}, found {found}")


def _check_values(name: str, tensor: Tensor) -> None:
    """CheckpointInvalid for a BF16 or FP32 tensor with NaN or infinity: no release has any.

    Codes and their scales are checked where they are dequantised.
    """
    if tensor.dtype not in (torch.bfloat16, torch.float32) or not tensor.numel():
        return
    if not torch.stack(tensor.aminmax()).isfinite().all():
        raise CheckpointInvalid(f"{name}: expected finite values, found NaN or infinity")


def _check_weights(
    state: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], arch: Architecture
) -> None:
    expected = {spec.weight: spec.weight_shape for spec in specs.values()}
    found = set(state)  # asking a lazy mapping whether it has a name would make the tensor
    for name in sorted(found - expected.keys()):
        raise CheckpointInvalid(f"{name}: expected no such tensor, found one to write")
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointInvalid(f"{name}: expected {list(shape)}, found no such tensor")
        if weight_class(name) == "table":
            check_table(name, state[name], arch)


def _write_shards(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    state: Mapping[str, Tensor],
    policy: Policy,
    shard_bytes: int,
) -> None:
    shards = list(_shards(specs, shard_bytes))
    files = [SINGLE_FILE]
    if len(shards) > 1:
        files = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    for file, weights in zip(files, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for name in weights:
            values = state[name].detach()
            _check_shape(name, values, specs)
            tensors |= quantise_tensor(name, values, policy=policy)
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_index(folder, specs, dict(zip(files, shards, strict=True)))


def _shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> Iterator[list[str]]:
    """Weight names in shards of about `shard_bytes`; a matrix and its scales stay together."""
    sizes: dict[str, int] = {}
    for spec in specs.values():
        sizes[spec.weight] = sizes.get(spec.weight, 0) + stored_bytes(spec)
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes that a stored tensor occupies."""
    width = {"F32": 4, "BF16": 2, "I64": 8}.get(spec.dtype, 1)
    for size in spec.shape:
        width *= size
    return width


def _write_index(
    folder: Path, specs: Mapping[str, TensorSpec], shards: Mapping[str, list[str]]
) -> None:
    file_of = {name: file for file, names in shards.items() for name in names}
    index = {
        "metadata": {"total_size": sum(stored_bytes(spec) for spec in specs.values())},
        "weight_map": {name: file_of[spec.weight] for name, spec in specs.items()},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _check_shape(name: str, tensor: Tensor, specs: Mapping[str, TensorSpec]) -> None:
    expected = specs[name].weight_shape
    if tuple(tensor.shape) != expected:
        raise CheckpointInvalid(f"{name}: expected {list(expected)}, found {list(tensor.shape)}")


@contextmanager
def _directory_in_one_step(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, renamed to `path` when the block ends well and removed otherwise."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists")
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.getpid()}.building")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    building.mkdir()
    try:
        yield building
        for written in (*sorted(building.iterdir()), building):
            _sync(written)
        if path.exists():
            path.rename(replaced)
        building.rename(path)
        _sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)


def _sync(path: Path) -> None:
    """A file's bytes, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what there is of tokenizer and generation settings, untouched."""
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copyfile(source / file, folder / file)


def _scale_of(name: str) -> str:
    return scale_name(name) if name.endswith(".weight") else ""


def _finite(name: str, tensor: Tensor) -> Tensor:
    # NaN and infinity reach the extremes, which cost a tenth of looking at every number.
    if not torch.stack(tensor.aminmax()).isfinite().all():
        raise ValueError(f"{name}: expected finite values, found NaN or infinity")
    return tensor


def _integers(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        raise ValueError(f"{name}: expected an integer table, found {tensor.dtype}")
    return tensor.long()
