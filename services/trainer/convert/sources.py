"""What can be converted, behind one face: a release, a directory in transformers' names, a
torch_dist checkpoint of the actor, a published version.

All names, dtypes and shapes are checked when a source is opened, from headers alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.trainer.convert.flat_files import (
    DTYPES,
    Extent,
    read_extent,
    safetensors_extents,
    version_extents,
)
from services.trainer.convert.formats import Stored
from services.trainer.convert.layouts import (
    Output,
    actor_layout,
    release_layout,
    transformers_layout,
    without_mtp,
)
from services.trainer.convert.torch_dist import METADATA_FILE, TorchDist, is_torch_dist
from services.trainer.convert.transformers_config import architecture_of
from shared.errors import ConfigInvalid
from shared.models.deepseek_v4.architecture import Architecture, WeightFormat, read_config
from shared.models.deepseek_v4.checkpoint import (
    CONFIG_FILE,
    check_headers,
    check_table,
    compare_tensors,
    open_release,
)
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.models.deepseek_v4.names import weight_shapes
from shared.quant.policy import POLICIES, ScaleType, scale_name
from shared.weights.manifest import MANIFEST_FILE

_EMBEDDING = "model.embed_tokens.weight"
_PROBED = "layers.0.attn.wq_a.weight", "layers.0.ffn.experts.0.w1.weight"
_FORMATS: dict[str, WeightFormat] = {"BF16": "bf16", "F32": "fp32", "F8_E4M3": "fp8", "I8": "fp4"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Source:
    """A checked checkpoint whose weights are read one by one."""

    description: str
    arch: Architecture
    files: Sequence[Path]
    settings: Path
    """Directory with config.json, and the tokenizer if there is one."""
    scale: ScaleType
    fetch: Callable[[str], Stored]

    def read(self, weight: str) -> Stored:
        """One weight by its release name; CheckpointInvalid if it cannot be what it should."""
        stored = self.fetch(weight)
        check_table(weight, stored.tensor, self.arch)
        return stored


def open_source(path: Path, *, like: Path | None = None) -> Source:
    """Find out what `path` is and check it; `like` has config and tokenizer if `path` has none."""
    for folder in (path, *([like] if like else [])):
        if not folder.is_dir():
            raise ConfigInvalid(f"{folder} is no directory.")
    settings = next((p for p in (like, path) if p and (p / CONFIG_FILE).exists()), None)
    if settings is None:
        raise ConfigInvalid(
            f"{like or path} has no {CONFIG_FILE}: name a release of the same model with --like."
        )
    if (path / MANIFEST_FILE).exists():
        return _published_version(path, settings)
    if is_torch_dist(path):
        return _torch_dist(path, settings)
    if not any(path.glob("*.safetensors")):
        raise ConfigInvalid(
            f"{path} has neither *.safetensors, nor {MANIFEST_FILE} of a published version, nor "
            f"{METADATA_FILE} of a torch_dist checkpoint."
        )
    extents = safetensors_extents(path)
    if _EMBEDDING in extents:
        return _transformers(path, settings, extents)
    return _release(path, settings, extents)


def _release(path: Path, settings: Path, extents: Mapping[str, Extent]) -> Source:
    kinds = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
    arch = Architecture.load(settings).with_format(_format_of(kinds, path))
    release = open_release(path, arch)
    return Source(
        description=f"{release.arch.weight_format.upper()} release",
        arch=release.arch,
        files=_files(extents),
        settings=settings,
        scale=release.policy.scale,
        fetch=_reader(extents),
    )


def _published_version(path: Path, settings: Path) -> Source:
    extents = version_extents(path)
    found = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
    arch = Architecture.load(settings).with_format(_format_of(found, path))
    policy = check_headers(found, arch, where=str(path))
    return Source(
        description=f"published version in {arch.weight_format.upper()}",
        arch=arch,
        files=[path / MANIFEST_FILE, *_files(extents)],
        settings=settings,
        scale=policy.scale,
        fetch=_reader(extents),
    )


def _transformers(path: Path, settings: Path, extents: Mapping[str, Extent]) -> Source:
    config = read_config(settings / CONFIG_FILE)
    arch = without_mtp(architecture_of(config)).with_format("bf16")
    # What transformers loaded by release names it saves by almost those names.
    of_release = any(".ffn." in name for name in extents)
    layout_of, canonical = (
        (release_layout, _release_name) if of_release else (transformers_layout, _loaded_name)
    )
    extents = {canonical(name): extent for name, extent in extents.items()}
    layout = layout_of(arch, POLICIES[arch.weight_format])
    found = {name: (extent.dtype, extent.shape) for name, extent in extents.items()}
    expected = {}
    for output in layout:
        dtype = found.get(output.name, ("", ()))[0]
        floating = output.dtype != "I64" and dtype in ("BF16", "F32")
        expected[output.name] = (dtype if floating else output.dtype, output.shape)
    compare_tensors(expected, found, where=str(path))
    pieces, shapes = _pieces(layout), weight_shapes(arch)

    def fetch(weight: str) -> Stored:
        output, number = pieces[weight]
        flat = read_extent(extents[output.name], piece=number, num_pieces=len(output.pieces))
        return Stored(flat.view(shapes[weight]))

    return Source(
        description="transformers checkpoint",
        arch=arch,
        files=_files(extents),
        settings=settings,
        scale="e8m0",
        fetch=fetch,
    )


def _torch_dist(path: Path, settings: Path) -> Source:
    checkpoint = TorchDist(path)
    stored = {
        name: (_NAMES.get(checkpoint.dtype(name), "?"), tuple(entry.size))
        for name, entry in checkpoint.tensors.items()
    }
    arch = Architecture.load(settings).with_format("bf16")
    if stored.get(_PROBED[0], ("", ()))[0] == "F32":
        arch = arch.with_format("fp32")
    layout = actor_layout(arch, POLICIES[arch.weight_format])
    expected = {output.name: (output.dtype, output.shape) for output in layout}
    found = {name: kind for name, kind in stored.items() if name in expected}  # no optimiser state
    compare_tensors(expected, found, where=str(path))
    pieces = _pieces(layout)

    def fetch(weight: str) -> Stored:
        output, number = pieces[weight]
        return Stored(checkpoint.read(output.name, output.pieces[number].index))

    return Source(
        description=f"torch_dist checkpoint in {arch.weight_format.upper()}",
        arch=arch,
        files=[path / METADATA_FILE, *checkpoint.files],
        settings=settings,
        scale="e8m0",
        fetch=fetch,
    )


def _files(extents: Mapping[str, Extent]) -> list[Path]:
    return sorted({extent.file for extent in extents.values()})


def _reader(extents: Mapping[str, Extent]) -> Callable[[str], Stored]:
    def fetch(weight: str) -> Stored:
        scale = scale_name(weight) if weight.endswith(".weight") else ""
        return Stored(_whole(extents[weight]), _whole(extents[scale]) if scale in extents else None)

    return fetch


def _whole(extent: Extent) -> Tensor:
    return read_extent(extent).view(extent.shape)


def _format_of(found: Mapping[str, tuple[str, tuple[int, ...]]], path: Path) -> WeightFormat:
    linear, expert = (found.get(name, ("", ()))[0] for name in _PROBED)
    if linear not in _FORMATS or expert not in _FORMATS:
        raise CheckpointInvalid(f"{path}: expected weights of DeepSeek-V4, found no {_PROBED[0]}")
    return _FORMATS[expert if linear == "F8_E4M3" else linear]


def _pieces(layout: Sequence[Output]) -> dict[str, tuple[Output, int]]:
    """Weight -> the tensor that holds it, and which of its pieces it is."""
    return {
        piece.weight: (output, number)
        for output in layout
        for number, piece in enumerate(output.pieces)
    }


def _release_name(saved: str) -> str:
    name = saved.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    return name.replace("embed_tokens.", "embed.").replace(".attn.norm.", ".attn.kv_norm.")


def _loaded_name(saved: str) -> str:
    """transformers loads `kv_norm` but saves it as `norm`."""
    owner, _, leaf = saved.rpartition(".norm.")
    renamed = owner.endswith((".self_attn", ".compressor", ".indexer"))
    return f"{owner}.kv_norm.{leaf}" if renamed else saved
