import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shared.models.deepseek_v4.checkpoint import (
    check_stored,
    dequantised,
    load_release,
    open_release,
    quantise_tensor,
    write_release,
)
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.models.deepseek_v4.names import tensor_specs
from shared.models.deepseek_v4.reference import Reference
from shared.quant.fp4 import dequantise_fp4, quantise_fp4
from shared.quant.fp8 import dequantise_fp8, quantise_fp8
from shared.quant.policy import POLICIES, Policy
from tests.tiny_deepseek_v4 import DEMO, SMALL, random_tokens, random_weights

FORMATS = ["fp8", "fp4", "bf16", "fp32"]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I64": torch.int64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(DEMO, seed=4)


@pytest.fixture
def release(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    write_release(tmp_path / "release", DEMO.with_format("fp8"), weights)
    return tmp_path / "release"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_written_release_is_what_its_table_says(
    tmp_path: Path, weights: dict[str, Tensor], weight_format: Any
) -> None:
    arch = DEMO.with_format(weight_format)
    write_release(tmp_path / "release", arch, weights)
    opened = open_release(tmp_path / "release")
    assert opened.arch == arch
    raw = load_release(tmp_path / "release")
    assert raw.keys() == tensor_specs(arch).keys()
    for name, spec in tensor_specs(arch).items():
        assert (raw[name].dtype, tuple(raw[name].shape)) == (DTYPES[spec.dtype], spec.shape)
    check_stored(raw, arch)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_values_survive_as_their_format_keeps_them(
    tmp_path: Path, weights: dict[str, Tensor], weight_format: Any
) -> None:
    write_release(tmp_path / "release", DEMO.with_format(weight_format), weights)
    values = dequantised(load_release(tmp_path / "release"))
    assert values.keys() == weights.keys()
    for name, weight in weights.items():
        expected = _as_stored(weight, name, weight_format)
        assert torch.equal(values[name], expected), name


def test_rewriting_a_release_changes_no_value(tmp_path: Path, release: Path) -> None:
    values = dequantised(load_release(release))
    write_release(tmp_path / "again", DEMO.with_format("fp8"), values)
    again = dequantised(load_release(tmp_path / "again"))
    assert all(torch.equal(values[name], again[name]) for name in values)


def test_shards_hold_whole_matrices_and_the_index_lists_all(
    tmp_path: Path, weights: dict[str, Tensor], release: Path
) -> None:
    arch = DEMO.with_format("fp8")
    write_release(tmp_path / "sharded", arch, weights, shard_bytes=200_000)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files)
    whole, sharded = load_release(release), load_release(tmp_path / "sharded")
    assert whole.keys() == sharded.keys() == index["weight_map"].keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), sharded[name].view(torch.uint8)), name
        if name.endswith(".scale"):
            matrix = name.removesuffix("scale") + "weight"
            assert index["weight_map"][name] == index["weight_map"][matrix]


def test_missing_shard_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_release(tmp_path / "s", DEMO.with_format("fp8"), weights, shard_bytes=200_000)
    lost = sorted((tmp_path / "s").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointInvalid, match=lost.name):
        load_release(tmp_path / "s")


def test_truncated_file_is_named(release: Path) -> None:
    file = release / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors: a header of"):
        load_release(release)


def test_missing_bytes_are_named_with_file_and_tensor(release: Path) -> None:
    file = release / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = r"model\.safetensors: expected at least \d+ bytes for [\w.]+, found \d+$"
    with pytest.raises(CheckpointInvalid, match=message):
        open_release(release)


def test_bytes_behind_the_last_tensor_are_named(release: Path) -> None:
    file = release / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors: .*"):
        load_release(release)


NORM = "norm.weight"
Header = dict[str, Any]
HEADERS: dict[str, tuple[Callable[[Header], object], str]] = {
    "no dtype": (lambda h: h[NORM].pop("dtype"), f"{NORM}: expected dtype, shape and data_off"),
    "no shape": (lambda h: h[NORM].pop("shape"), f"{NORM}: expected dtype, shape and data_off"),
    "no offsets": (lambda h: h[NORM].pop("data_offsets"), f"{NORM}: expected dtype, shape and"),
    "no entry": (lambda h: h.update({NORM: 3}), f"{NORM}: expected dtype, .*, found 3"),
    "shape below 0": (lambda h: h[NORM].update(shape=[-128]), f"{NORM}: expected sizes"),
    "bytes too few": (
        lambda h: h[NORM].update(data_offsets=[0, 7]),
        rf"{NORM}: 7 bytes in .*model\.safetensors, but BF16 \[128\] has 256",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_that_is_off_is_named_with_file_and_tensor(release: Path, case: str) -> None:
    change, message = HEADERS[case]
    file = release / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(CheckpointInvalid, match=message) as raised:
        open_release(release)
    assert "model.safetensors" in str(raised.value)


@pytest.mark.parametrize("text", [b"{nothing", b"\xff\xff", b"[]"])
def test_header_or_index_of_garbage_is_named(release: Path, text: bytes) -> None:
    index = release / "model.safetensors.index.json"
    index.write_bytes(text)
    with pytest.raises(CheckpointInvalid, match=r"index\.json: expected (a )?JSON"):
        open_release(release)
    index.unlink()
    (release / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors: expected (a )?JSON"):
        open_release(release)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "expected weight_map to be an object"),
        ({"weight_map": []}, "expected weight_map to be an object"),
        ({"weight_map": {NORM: 3}}, f"{NORM}: expected a file's name, found 3"),
        ({"weight_map": {NORM: "../model.safetensors"}}, f"{NORM}: expected a file's name"),
    ],
)
def test_index_that_lists_no_files_is_named(release: Path, index: Any, message: str) -> None:
    (release / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointInvalid, match=rf"index\.json: {message}"):
        open_release(release)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200_000])
def test_tensor_in_two_files_is_named(
    tmp_path: Path, weights: dict[str, Tensor], shard_bytes: int
) -> None:
    folder = tmp_path / "release"
    write_release(folder, DEMO.with_format("fp8"), weights, shard_bytes=shard_bytes)
    whole = load_release(folder)
    save_file({NORM: whole[NORM]}, folder / "model-00009-of-00009.safetensors")
    with pytest.raises(CheckpointInvalid, match=rf"^{NORM}: expected (in one file|by .*), found"):
        open_release(folder)


BIAS = "layers.3.ffn.gate.bias"
Edit = Callable[[dict[str, Tensor]], None]


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[BIAS]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.bias"] = tensors[BIAS].clone()


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors[BIAS] = tensors[BIAS][:7].clone()


def _recast(tensors: dict[str, Tensor]) -> None:
    tensors[BIAS] = tensors[BIAS].bfloat16()


def _shorten_table(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"][:300].clone()


def _float_table(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()


def _foreign_expert(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.ffn.gate.tid2eid"][5, 0] = 8


def _same_expert_twice(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.ffn.gate.tid2eid"][5] = 3


def _byte_scale(tensors: dict[str, Tensor]) -> None:
    name = "layers.2.attn.wq_b.scale"
    tensors[name] = tensors[name].view(torch.uint8)


def _one_fp4_expert(tensors: dict[str, Tensor]) -> None:
    name = "layers.1.ffn.experts.3.w2.weight"
    tensors[name] = quantise_fp4(tensors[name].float())[0]


EDITS: dict[str, tuple[Edit, str]] = {
    "missing": (_drop, rf"{BIAS}: expected F32 \[8\], found no such tensor"),
    "extra": (_add, r"layers.0.ffn.gate.bias: expected no such tensor, found F32 \[8\]"),
    "wrong shape": (_reshape, rf"{BIAS}: expected F32 \[8\], found F32 \[7\]"),
    "wrong dtype": (_recast, rf"{BIAS}: expected F32 \[8\], found BF16 \[8\]"),
    "vocabulary": (_shorten_table, r"tid2eid: expected I64 \[320, 2\], found I64 \[300, 2\]"),
    "float table": (_float_table, r"tid2eid: expected I64 \[320, 2\], found F32 \[320, 2\]"),
    "unknown expert": (_foreign_expert, r"tid2eid: expected expert ids in \[0, 8\), found 0 to 8"),
    "an expert twice": (_same_expert_twice, r"1.ffn.gate.tid2eid: .* row 5, found \[3, 3\]"),
    "scale as bytes": (_byte_scale, r"wq_b.scale: expected F8_E8M0 \[2, 1\], found I8 \[2, 1\]"),
    "one other expert": (_one_fp4_expert, r"experts.3.w2.weight: expected F8_E4M3 .*, found I8"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_release_that_is_off_is_one_error(release: Path, edit: str) -> None:
    change, message = EDITS[edit]
    tensors = load_file(release / "model.safetensors")
    change(tensors)
    with pytest.raises(CheckpointInvalid, match=message):
        check_stored(tensors, DEMO.with_format("fp8"))
    save_file(tensors, release / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=message):
        load_release(release)


@pytest.mark.parametrize("name", ["norm.weight", "embed.weight", "layers.0.attn.attn_sink"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_named(release: Path, name: str, value: float) -> None:
    tensors = load_file(release / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, release / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=f"^{name}: expected finite values"):
        load_release(release)


def test_more_than_one_fault_is_counted(release: Path) -> None:
    tensors = load_file(release / "model.safetensors")
    _add(tensors)
    _drop(tensors)
    _shorten_table(tensors)
    with pytest.raises(CheckpointInvalid, match=r"\(and 2 more\)"):
        check_stored(tensors, DEMO.with_format("fp8"))


def test_other_architecture_is_refused(release: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"expected .* \(and \d+ more\)"):
        load_release(release, SMALL.with_format("fp8"))


def test_scales_in_fp32_are_read_from_the_file(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    arch = DEMO.with_format("fp8")
    write_release(tmp_path / "wide", arch, weights, policy=Policy("fp8", "fp8", scale="fp32"))
    write_release(tmp_path / "narrow", arch, weights)
    assert open_release(tmp_path / "wide").policy.scale == "fp32"
    wide, narrow = (dequantised(load_release(tmp_path / p)) for p in ("wide", "narrow"))
    assert all(torch.equal(wide[name], narrow[name]) for name in narrow)


def test_stale_config_does_not_hide_the_experts_format(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    write_release(tmp_path / "release", DEMO.with_format("fp4"), weights)
    stale = DEMO.with_format("fp8").to_config()
    (tmp_path / "release/config.json").write_text(json.dumps(stale))
    opened = open_release(tmp_path / "release")
    assert opened.policy.expert == "fp4"
    assert opened.arch.weight_format == "fp4"


def test_failed_write_leaves_what_was_there(
    tmp_path: Path, weights: dict[str, Tensor], release: Path
) -> None:
    before = load_release(release)
    broken = weights | {"layers.2.attn.wkv.weight": torch.full((64, 128), float("nan"))}
    with pytest.raises(ValueError, match=r"layers\.2\.attn\.wkv\.weight: NaN or infinity"):
        write_release(release, DEMO.with_format("fp8"), broken, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]
    assert load_release(release).keys() == before.keys()
    with pytest.raises(ValueError, match="wkv"):
        write_release(tmp_path / "fresh", DEMO.with_format("fp8"), broken)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_everything_is_on_the_disk_before_the_directory_appears(
    tmp_path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert (tmp_path / "release").exists() == (synced[-1] == tmp_path.name)

    monkeypatch.setattr("os.fsync", fsync)
    write_release(tmp_path / "release", DEMO, weights)
    assert synced[:2] == ["config.json", "model.safetensors"]
    assert synced[-1] == tmp_path.name


def test_existing_release_is_only_replaced_on_request(
    release: Path, weights: dict[str, Tensor]
) -> None:
    with pytest.raises(FileExistsError, match="release exists"):
        write_release(release, DEMO, weights)
    write_release(release, DEMO, weights, overwrite=True)
    assert open_release(release).arch.weight_format == "fp32"
    assert [path.name for path in release.parent.iterdir()] == ["release"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, r"norm.weight: expected \[128\], found no such tensor"),
        ({"more": torch.zeros(1)}, "more: expected no such tensor"),
        ({"norm.weight": torch.zeros(64)}, r"norm.weight: expected \[128\], found \[64\]"),
        ({"norm.weight": torch.full((128,), float("inf"))}, "norm.weight: expected finite"),
        ({"layers.0.attn.attn_sink": torch.full((4,), float("nan"))}, "attn_sink: expected finite"),
        ({"layers.0.ffn.gate.tid2eid": torch.zeros(320, 2)}, "tid2eid: expected an integer table"),
        ({"layers.0.ffn.gate.tid2eid": torch.full((320, 2), 9)}, r"ids in \[0, 8\), found 9 to 9"),
    ],
)
def test_weights_that_cannot_be_stored_are_refused(
    tmp_path: Path, weights: dict[str, Tensor], change: dict[str, Any], message: str
) -> None:
    changed = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        write_release(tmp_path / "release", DEMO.with_format("fp8"), changed)


def test_tokenizer_is_copied_untouched(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(b'{"odd":   "spacing\\u00e9"}\n')
    (source / "notes.txt").write_text("not part of a release")
    write_release(tmp_path / "release", DEMO, weights, tokenizer_from=source)
    copied = (tmp_path / "release/tokenizer.json").read_bytes()
    assert copied == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "release/notes.txt").exists()


def test_writing_asks_for_one_shard_at_a_time(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    class Lazy(Mapping[str, Tensor]):
        asked: list[str]

        def __init__(self) -> None:
            self.asked = []

        def __getitem__(self, name: str) -> Tensor:
            self.asked.append(name)
            return weights[name]

        def __iter__(self) -> Iterator[str]:
            return iter(weights)

        def __len__(self) -> int:
            return len(weights)

    lazy = Lazy()
    write_release(tmp_path / "release", DEMO, lazy, shard_bytes=100_000)
    matrices = [name for name in lazy.asked if not name.endswith("tid2eid")]
    assert len(matrices) == len(set(matrices))


def test_release_readers_can_stream(release: Path) -> None:
    opened = open_release(release)
    names = ["layers.1.ffn.gate.tid2eid", "norm.weight"]
    assert {name for name, _ in opened.read(names)} == set(names)


@pytest.mark.parametrize("weight_format", ["fp8", "fp4"])
def test_quantise_tensor_gives_codes_and_scales(weight_format: str) -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    name = "layers.0.ffn.experts.3.w1.weight"
    stored = quantise_tensor(name, weight, policy=POLICIES[weight_format])
    assert list(stored) == [name, "layers.0.ffn.experts.3.w1.scale"]
    dequantise = dequantise_fp8 if weight_format == "fp8" else dequantise_fp4
    values = dequantise(*stored.values())
    assert torch.equal(dequantised(stored)[name], values)
    with pytest.raises(CheckpointInvalid, match=r"experts\.3\.w1\.weight: expected a scale"):
        dequantised({name: stored[name]})


@pytest.mark.parametrize("weight_format", ["bf16", "fp32"])
@torch.no_grad()
def test_transformers_loads_what_is_written(
    tmp_path: Path, weights: dict[str, Tensor], weight_format: Any
) -> None:
    arch = DEMO.with_format(weight_format)
    write_release(tmp_path / "release", arch, weights)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "release", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = random_tokens(DEMO, rows=1, length=80)
    ours = Reference(dequantised(load_release(tmp_path / "release")), arch).forward(tokens).logits
    assert (theirs(tokens).logits - ours).abs().max() <= 2e-5 * ours.abs().max()


def _as_stored(weight: Tensor, name: str, weight_format: str) -> Tensor:
    if not weight.is_floating_point() or weight_format == "fp32":
        return weight
    exact = ("hc_", "attn_sink", "ape", "gate.bias")
    if any(part in name for part in exact):
        return weight
    linear = weight_format != "bf16" and weight.dim() == 2
    if linear and ".experts." in name and weight_format == "fp4":
        return dequantise_fp4(*quantise_fp4(weight))
    kept = ("embed", "head.weight", "compressor", "weights_proj", "gate.weight")
    if linear and not any(part in name for part in kept):
        return dequantise_fp8(*quantise_fp8(weight))
    return weight.bfloat16().float()
