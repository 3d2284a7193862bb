"""Convert a checkpoint: check everything, then write shard after shard, then let the result appear.

Memory is that of a few pieces (a matrix of one expert, an embedding), whatever the model's size.
Killed at any moment it goes on with the first unfinished shard; the target is never half there.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from services.trainer.convert.flat_files import DTYPES
from services.trainer.convert.formats import recast
from services.trainer.convert.layouts import (
    Output,
    Piece,
    actor_layout,
    release_layout,
    shards,
    transformers_layout,
    without_mtp,
)
from services.trainer.convert.sources import Source, open_source
from services.trainer.convert.targets import (
    HashedFile,
    MegatronTorchDist,
    Safetensors,
    Shard,
    Target,
    file_checksum,
)
from services.trainer.convert.torch_dist import TorchDist
from services.trainer.convert.workspace import (
    REPORT_FILE,
    Record,
    Workspace,
    Written,
    check_target,
    fault_of,
    workspace,
)
from shared.errors import ConfigInvalid
from shared.models.deepseek_v4.architecture import Architecture, WeightFormat
from shared.models.deepseek_v4.checkpoint import CONFIG_FILE, copy_tokenizer, open_release
from shared.quant.policy import POLICIES, Policy
from shared.weights.conversion import (
    ConversionEvent,
    ConversionTarget,
    Finished,
    Planned,
    Progressed,
)

Report = Callable[[ConversionEvent], None]


@dataclass(frozen=True, slots=True)
class Request:
    """`wide` keeps FP32 where `to` names a layout of unquantised weights; `like` has the config."""

    source: Path
    target: Path
    to: ConversionTarget
    like: Path | None = None
    wide: bool = False
    overwrite: bool = False
    max_shard_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True)
class _Plan:
    source: Source
    arch: Architecture
    policy: Policy
    target: Target
    shards: list[Shard]
    document: dict[str, Any]
    notes: list[str]


def convert(request: Request, report: Report) -> None:
    """ConfigInvalid or ValueError (CheckpointInvalid) says in a sentence what is wrong."""
    began_s = time.monotonic()
    plan = _plan(request)
    size = sum(out.num_bytes for shard in plan.shards for out in shard.outputs)
    if _is_there(request.target, plan, overwrite=request.overwrite):
        done = Finished(path=str(request.target), num_bytes=size, seconds=0.0, already_there=True)
        return report(done)
    check_target(request.target, overwrite=request.overwrite)
    with workspace(request.target) as space:
        records = _resume(space, plan, size, report)
        space.check_space(sum(s.num_bytes for s in plan.shards if s.file not in records))
        progress = _Progress(report, _kept_bytes(plan, records), len(records))
        maker = _Maker(plan.source, plan.policy)
        for shard in plan.shards:
            if shard.file not in records:
                records[shard.file] = _write_shard(space, plan, shard, maker, progress)
        _complete(space.result, plan, records)
        space.finish()
    seconds = time.monotonic() - began_s
    report(Finished(path=str(request.target), num_bytes=size, seconds=seconds))


def _plan(request: Request) -> _Plan:
    if request.target.resolve() == request.source.resolve():
        raise ConfigInvalid(f"{request.target}: source and target are one directory.")
    source = open_source(request.source, like=request.like)
    arch, notes = source.arch, []
    if request.to == "transformers" and arch.num_nextn_predict_layers:
        arch = without_mtp(arch)
        notes.append("transformers has no MTP blocks: their weights are left out.")
    arch = arch.with_format(_format(request))
    policy = POLICIES[arch.weight_format]
    if arch.quantization_config is not None:
        policy = replace(policy, scale=source.scale)
    layouts = {"transformers": transformers_layout, "torch_dist": actor_layout}
    outputs = layouts.get(request.to, release_layout)(arch, policy)
    target: Target = MegatronTorchDist() if request.to == "torch_dist" else Safetensors()
    groups = list(shards(outputs, request.max_shard_bytes))
    document = _document(request, source, arch)
    return _Plan(source, arch, policy, target, target.shards(groups), document, notes)


def _format(request: Request) -> WeightFormat:
    match request.to:
        case "transformers" | "torch_dist":
            return "fp32" if request.wide else "bf16"
        case weight_format:
            return weight_format


def _document(request: Request, source: Source, arch: Architecture) -> dict[str, Any]:
    """What must not change between two runs that share their work."""
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in source.files]
    return {
        "source": str(request.source.resolve()),
        "source_files": files,
        "to": request.to,
        "config": arch.to_config(),
        "max_shard_bytes": request.max_shard_bytes,
    }


def _is_there(target: Path, plan: _Plan, *, overwrite: bool) -> bool:
    """Whether the target is this conversion's result already, byte by byte.

    ConfigInvalid if it was and is damaged, unless it may be overwritten.
    """
    file = target / REPORT_FILE
    fault = None
    try:
        report = json.loads(file.read_text())
        if report["plan"] != plan.document:
            return False
        written = [Written(**entry) for entry in [*report["shards"], *report["files"]]]
        fault = next(filter(None, (fault_of(target / one.file, one) for one in written)), None)
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError) as err:
        fault = f"{file} is no report of a conversion ({err!r})"
    if fault is not None and not overwrite:
        raise ConfigInvalid(f"{fault}: remove {target}, or convert again with --overwrite.")
    return fault is None


def _resume(space: Workspace, plan: _Plan, size: int, report: Report) -> dict[str, Record]:
    notes = list(plan.notes)
    if not space.prepare(plan.document):
        notes.append("What an earlier conversion of another source or format left is thrown away.")
    records = space.kept(plan.shards)
    report(
        Planned(
            source=plan.source.description,
            num_tensors=sum(len(shard.outputs) for shard in plan.shards),
            num_shards=len(plan.shards),
            total_bytes=size,
            kept_bytes=_kept_bytes(plan, records),
            notes=notes,
        )
    )
    return records


def _kept_bytes(plan: _Plan, records: Mapping[str, Record]) -> int:
    outputs = [out for shard in plan.shards if shard.file in records for out in shard.outputs]
    return sum(output.num_bytes for output in outputs)


def _write_shard(
    space: Workspace, plan: _Plan, shard: Shard, maker: "_Maker", progress: "_Progress"
) -> Record:
    """One file, and then the record that it is whole."""
    algorithm = plan.target.algorithm
    with HashedFile(space.result / shard.file, algorithm) as file:
        plan.target.begin(file, shard)
        rows = []
        for output in shard.outputs:
            for piece in output.pieces:
                tensor = maker.make(output, piece)
                row = plan.target.put(file, output, piece, tensor)
                rows += [row] if row else []
                progress.advance(tensor.nbytes, output.name)
        record = Record(shard.file, file.num_bytes, algorithm, file.sync(), rows)
    space.keep(record)
    progress.finish_shard(shard.outputs[-1].name)
    return record


@dataclass(slots=True)
class _Maker:
    """Pieces from the source; codes and scales of a weight are made together, once."""

    source: Source
    policy: Policy
    _weight: str = ""
    _parts: dict[str, Tensor] = field(default_factory=dict)

    def make(self, output: Output, piece: Piece) -> Tensor:
        if piece.weight != self._weight:
            self._parts = {}  # before the next is read
            stored = self.source.read(piece.weight)
            self._parts = recast(piece.weight, stored, policy=self.policy)
            self._weight = piece.weight
        tensor = self._parts[piece.part]
        assert tensor.dtype == DTYPES[output.dtype], (piece, tensor.dtype, output.dtype)
        assert tensor.numel() * len(output.pieces) == _numel(output), (piece, tensor.shape)
        return tensor


def _numel(output: Output) -> int:
    return output.num_bytes // DTYPES[output.dtype].itemsize


class _Progress:
    """Reports at most some times a second, and every finished shard."""

    _EVERY_S = 0.2

    def __init__(self, report: Report, done_bytes: int, num_shards_done: int) -> None:
        self._report = report
        self._bytes = done_bytes
        self._shards = num_shards_done
        self._last_s = time.monotonic()

    def advance(self, num_bytes: int, tensor: str) -> None:
        self._bytes += num_bytes
        if time.monotonic() - self._last_s >= self._EVERY_S:
            self._tell(tensor)

    def finish_shard(self, tensor: str) -> None:
        self._shards += 1
        self._tell(tensor)

    def _tell(self, tensor: str) -> None:
        self._last_s = time.monotonic()
        self._report(
            Progressed(done_bytes=self._bytes, num_shards_done=self._shards, tensor=tensor)
        )


def _write_report(result: Path, plan: _Plan, records: Sequence[Record]) -> None:
    """Last: it lists every other file of the result, so that each can be verified."""
    shards_done = [Written(r.file, r.num_bytes, r.algorithm, r.checksum) for r in records]
    algorithm = plan.target.algorithm
    small = [
        Written(path.name, path.stat().st_size, algorithm, file_checksum(path, algorithm))
        for path in sorted(result.iterdir())
        if path.name not in {record.file for record in records}
    ]
    listed = {"shards": [*map(asdict, shards_done)], "files": [*map(asdict, small)]}
    text = json.dumps({"plan": plan.document, **listed}, indent=2) + "\n"
    (result / REPORT_FILE).write_text(text)


def _complete(result: Path, plan: _Plan, records: Mapping[str, Record]) -> None:
    """Config, tokenizer, report and index; then a look at the result with its reader's eyes."""
    (result / CONFIG_FILE).write_text(json.dumps(plan.arch.to_config(), indent=2) + "\n")
    copy_tokenizer(plan.source.settings, result)
    shards_done = [records[shard.file] for shard in plan.shards]
    rows = [row for record in shards_done for row in record.rows]
    checksums = {record.file: record.checksum for record in shards_done}
    plan.target.finish(result, plan.shards, rows, checksums)
    _write_report(result, plan, shards_done)
    if isinstance(plan.target, MegatronTorchDist):
        assert len(TorchDist(result).tensors) == sum(len(s.outputs) for s in plan.shards)
    elif plan.document["to"] != "transformers":
        open_release(result)
