"""Whole conversions: what goes in comes out, in every reader's eyes, and kills cost one shard."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.trainer import checkpoint
from services.trainer.convert.conversion import Request, convert
from services.trainer.convert.layouts import actor_layout
from services.trainer.engine.initial import load_release_weights
from services.trainer.export import export_version
from services.trainer.megatron import parallel
from services.trainer.megatron.optimizer import build_optimizer, wrap
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.errors import ConfigInvalid, WeightsCorrupt
from shared.job_actor import OptimizerSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release, write_release
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.models.deepseek_v4.reference import Reference
from shared.quant.policy import POLICIES
from shared.weights.conversion import ConversionEvent, Finished, Planned, Progressed, read_event
from tests.parity.engines import sampler_logits
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

ARCH = replace(SMALL, num_nextn_predict_layers=1, compress_ratios=(*SMALL.compress_ratios, 0))
SHARD = 40_000  # bytes: a dozen files
Weights = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def megatron() -> Iterator[None]:
    """A world of one, only where it is needed: transformers loads other weights inside of one."""
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as a release in every format, with a tokenizer."""
    weights, folder = random_weights(ARCH, seed=5), tmp_path_factory.mktemp("releases")
    paths = {name: folder / name for name in ("fp8", "fp4", "bf16", "fp32")}
    for name, path in paths.items():
        write_release(path, ARCH.with_format(name), weights, shard_bytes=SHARD)  # type: ignore[arg-type]
        (path / "tokenizer.json").write_text("{}")
    return paths


def run(source: Path, target: Path, to: Any, **options: Any) -> list[ConversionEvent]:
    events: list[ConversionEvent] = []
    convert(Request(source, target, to, max_shard_bytes=SHARD, **options), events.append)
    return events


def values(path: Path) -> Weights:
    return dequantised(load_release(path))


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name


def without_mtp(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}


@pytest.mark.parametrize("source", ["fp8", "fp4"])
@pytest.mark.parametrize("to", ["bf16", "fp8", "fp32"])
def test_quantised_releases_become_others_without_loss(
    releases: dict[str, Path], tmp_path: Path, source: str, to: str
) -> None:
    events = run(releases[source], tmp_path / "out", to)
    assert_equal(values(tmp_path / "out"), values(releases[source]))
    assert Architecture.load(tmp_path / "out").weight_format == to
    assert (tmp_path / "out/tokenizer.json").exists()
    planned, *_, finished = events
    assert isinstance(planned, Planned)
    assert isinstance(finished, Finished)
    assert planned.num_shards == len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("to", ["fp8", "fp4"])
def test_values_are_quantised_to_the_bytes_that_a_writer_makes(
    releases: dict[str, Path], tmp_path: Path, to: str
) -> None:
    run(releases["fp32"], tmp_path / "out", to)
    ours, theirs = load_release(tmp_path / "out"), load_release(releases[to])
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@torch.no_grad()
@pytest.mark.parametrize("to", ["bf16", "transformers"])
def test_transformers_loads_the_result(releases: dict[str, Path], tmp_path: Path, to: str) -> None:
    run(releases["fp4"], tmp_path / "out", to)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = random_tokens(ARCH, rows=1, length=80)
    ours = Reference(values(releases["fp4"]), ARCH).forward(tokens).logits
    assert (theirs(tokens).logits - ours).abs().max() <= 2e-5 * ours.abs().max()


@pytest.mark.parametrize("names", ["release", "theirs"])
def test_what_transformers_saved_becomes_a_release(
    releases: dict[str, Path], tmp_path: Path, names: str
) -> None:
    """It saves by other names if it has loaded by other names."""
    expected = without_mtp(values(releases["bf16"]))
    loaded = releases["bf16"]
    if names == "theirs":
        loaded = tmp_path / "theirs"
        run(releases["bf16"], loaded, "transformers")
    model = AutoModelForCausalLM.from_pretrained(loaded, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "out", "bf16")
    assert_equal(values(tmp_path / "out"), expected)


def test_transformers_names_and_back(releases: dict[str, Path], tmp_path: Path) -> None:
    events = run(releases["fp8"], tmp_path / "theirs", "transformers")
    assert isinstance(events[0], Planned)
    assert events[0].notes == ["transformers has no MTP blocks: their weights are left out."]
    run(tmp_path / "theirs", tmp_path / "out", "fp8")
    assert_equal(values(tmp_path / "out"), without_mtp(values(releases["fp8"])))


@pytest.mark.usefixtures("megatron")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about how Megatron calls it
@pytest.mark.parametrize(("wide", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_actor_loads_torch_dist_and_it_converts_back(
    releases: dict[str, Path], tmp_path: Path, wide: bool, dtype: str
) -> None:
    run(releases["fp8"], tmp_path / "dist", "torch_dist", wide=wide)
    model = DeepSeekV4(transformer_config(ARCH, dtype=dtype), ARCH)
    checkpoint.load_model(model, tmp_path / "dist")
    assert_equal(dict(release_tensors(model)), values(releases["fp8"]))
    expected = {o.name: o for o in actor_layout(ARCH, POLICIES["fp32" if wide else "bf16"])}
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: output.shape for name, output in expected.items()
    }
    run(tmp_path / "dist", tmp_path / "out", "fp8")
    assert_equal(values(tmp_path / "out"), values(releases["fp8"]))


@pytest.mark.usefixtures("megatron")
def test_actor_refuses_a_torch_dist_with_a_flipped_bit(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    run(releases["fp8"], tmp_path / "dist", "torch_dist")
    file = sorted((tmp_path / "dist").glob("*.distcp"))[3]
    flip_bit(file)
    model = DeepSeekV4(transformer_config(ARCH, dtype="bfloat16"), ARCH)
    with pytest.raises(WeightsCorrupt, match=file.name):
        checkpoint.load_model(model, tmp_path / "dist")


@pytest.mark.usefixtures("megatron")
def test_a_training_checkpoint_becomes_what_the_publisher_exports(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    config = transformer_config(ARCH, dtype="bfloat16")
    model = DeepSeekV4(config, ARCH)
    load_release_weights(model, releases["bf16"])
    optimizer = build_optimizer(wrap(model, config), config, OptimizerSection())
    progress = {"step": 3, "policy_version": 3}
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optimizer, progress=progress)
    (tmp_path / "version").mkdir()
    export_version(
        release_tensors(model),
        tmp_path / "version",
        job_id="job",
        policy_version=3,
        policy=POLICIES["fp4"],
        max_shard_bytes=SHARD,
    )
    run(tmp_path / "saved", tmp_path / "from_checkpoint", "fp4", like=releases["fp8"])
    run(tmp_path / "version", tmp_path / "from_version", "fp4", like=releases["fp8"])
    ours, theirs = (
        load_release(tmp_path / "from_checkpoint"),
        load_release(tmp_path / "from_version"),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("to", ["bf16", "fp8"])
def test_sampler_loads_the_result(releases: dict[str, Path], tmp_path: Path, to: str) -> None:
    run(releases["fp4"], tmp_path / "out", to)
    tokens = random_tokens(ARCH, rows=1, length=40)
    stored = load_release(tmp_path / "out")
    found = sampler_logits(Architecture.load(tmp_path / "out"), stored, tokens)
    expected = Reference(values(releases["fp4"]), ARCH).forward(tokens).logits
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_files_are_laid_out_as_readers_map_them(releases: dict[str, Path], tmp_path: Path) -> None:
    """Another reader's eyes, and numbers at multiples of their size."""
    run(releases["fp8"], tmp_path / "out", "fp4")
    raw = load_release(tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        assert torch.equal(tensor.view(torch.uint8), raw[name].view(torch.uint8))
        assert tensor.storage_offset() % tensor.element_size() == 0


class _Killed(BaseException):
    pass


def interrupted(source: Path, target: Path, to: Any, *, after: int) -> None:
    """A conversion that stops, without a word, after some shards."""

    def report(event: ConversionEvent) -> None:
        if isinstance(event, Progressed) and event.num_shards_done == after:
            raise _Killed

    with pytest.raises(_Killed):
        convert(Request(source, target, to, max_shard_bytes=SHARD), report)


@pytest.mark.parametrize("to", ["bf16", "torch_dist", "transformers"])
def test_an_interrupted_conversion_goes_on(
    releases: dict[str, Path], tmp_path: Path, to: str
) -> None:
    interrupted(releases["fp8"], tmp_path / "out", to, after=3)
    assert not (tmp_path / "out").exists()
    events = run(releases["fp8"], tmp_path / "out", to)
    assert isinstance(events[0], Planned)
    assert events[0].kept_bytes > SHARD
    assert next(e.num_shards_done for e in events if isinstance(e, Progressed)) >= 3
    back = tmp_path / "back"
    run(tmp_path / "out", back, "bf16", like=releases["fp8"])
    found, expected = values(back), values(releases["fp8"])
    assert_equal(found, without_mtp(expected) if to == "transformers" else expected)


def test_a_finished_shard_that_was_damaged_is_written_again(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    interrupted(releases["fp8"], tmp_path / "out", "bf16", after=3)
    flip_bit(sorted((tmp_path / ".out.converting/result").glob("*.safetensors"))[1])
    run(releases["fp8"], tmp_path / "out", "bf16")
    assert_equal(values(tmp_path / "out"), values(releases["fp8"]))


def test_work_for_another_source_is_thrown_away(releases: dict[str, Path], tmp_path: Path) -> None:
    interrupted(releases["fp8"], tmp_path / "out", "bf16", after=3)
    events = run(releases["fp4"], tmp_path / "out", "bf16")
    assert isinstance(events[0], Planned)
    assert events[0].kept_bytes == 0
    assert "thrown away" in events[0].notes[0]
    assert_equal(values(tmp_path / "out"), values(releases["fp4"]))


def test_the_same_conversion_again_does_nothing(releases: dict[str, Path], tmp_path: Path) -> None:
    run(releases["fp8"], tmp_path / "out", "bf16")
    (event,) = run(releases["fp8"], tmp_path / "out", "bf16")
    assert isinstance(event, Finished)
    assert event.already_there
    with pytest.raises(ConfigInvalid, match="exists: remove it, or replace it with --overwrite"):
        run(releases["fp8"], tmp_path / "out", "fp8")
    run(releases["fp8"], tmp_path / "out", "fp8", overwrite=True)
    assert Architecture.load(tmp_path / "out").weight_format == "fp8"


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "deleted shard": ("model-00002-of-*.safetensors", Path.unlink, "is missing"),
    "short shard": ("model-00003-of-*.safetensors", lambda f: f.write_bytes(b"junk"), "4 bytes"),
    "junk in a shard": ("model-00004-of-*.safetensors", lambda f: flip_bit(f), "has checksum"),
    "no index": ("model.safetensors.index.json", Path.unlink, "is missing"),
    "another config": ("config.json", lambda f: f.write_text("{}"), "has 2 bytes"),
    "no report": ("conversion.json", lambda f: f.write_text("{}"), "is no report of a conversion"),
    "garbage for a report": ("conversion.json", lambda f: f.write_text("{"), "is no report of"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result_is_not_there_and_can_be_made_again(
    releases: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    out, (pattern, spoil, message) = tmp_path / "out", DAMAGE[damage]
    run(releases["fp8"], out, "bf16")
    (file,) = out.glob(pattern)
    spoil(file)
    with pytest.raises(ConfigInvalid, match=f"{file.name} .*{message}.*with --overwrite"):
        run(releases["fp8"], out, "bf16")
    *_, finished = run(releases["fp8"], out, "bf16", overwrite=True)
    assert isinstance(finished, Finished)
    assert not finished.already_there
    (event,) = run(releases["fp8"], out, "bf16")
    assert isinstance(event, Finished)
    assert event.already_there
    assert_equal(values(out), values(releases["fp8"]))


def test_a_bad_number_is_refused_with_its_tensor(releases: dict[str, Path], tmp_path: Path) -> None:
    weights = values(releases["fp32"])
    name = "layers.2.ffn.experts.5.w2.weight"
    weights[name][3, 7] = float("nan")
    folder = tmp_path / "bad"
    shutil.copytree(releases["fp32"], folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index[name]
    save_file({**load_file(file), name: weights[name]}, file)
    for to in ("fp8", "fp4", "bf16", "torch_dist"):
        with pytest.raises(ValueError, match=f"^{name}: .*NaN or infinity"):
            run(folder, tmp_path / to, to)
        assert not (tmp_path / to).exists()


def test_sources_that_are_no_model_are_one_sentence(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigInvalid, match="nothing is no directory"):
        run(tmp_path / "nothing", tmp_path / "out", "bf16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigInvalid, match=r"has no config\.json: name a release .* --like"):
        run(tmp_path / "empty", tmp_path / "out", "bf16")
    with pytest.raises(ConfigInvalid, match=r"has neither \*\.safetensors, nor"):
        run(tmp_path / "empty", tmp_path / "out", "bf16", like=releases["fp8"])
    with pytest.raises(ConfigInvalid, match="source and target are one directory"):
        run(releases["fp8"], releases["fp8"], "bf16")


@pytest.mark.parametrize("to", ["transformers", "torch_dist"])
def test_a_source_of_another_model_is_one_error(
    releases: dict[str, Path], tmp_path: Path, to: str
) -> None:
    run(releases["fp8"], tmp_path / "source", to)
    other = replace(ARCH, moe_intermediate_size=64)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(other.to_config()))
    with pytest.raises(
        CheckpointInvalid, match=r"experts.*expected .*64.*found .*\(and \d+ more\)"
    ):
        run(tmp_path / "source", tmp_path / "out", "bf16", like=tmp_path / "other")


def test_a_truncated_source_is_found_before_anything_is_written(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(releases["fp8"], tmp_path / "source")
    file = sorted((tmp_path / "source").glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointInvalid, match=f"{file.name}: expected at least"):
        run(tmp_path / "source", tmp_path / "out", "bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def runner(*arguments: str, module: str = "services.trainer.convert") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(180)  # starts processes that import torch
def test_kill_9_costs_one_shard(releases: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(releases["fp8"]), str(out), "--to", "fp32", "--max-shard-bytes", "10000"]
    process = runner(*arguments)
    assert process.stdout is not None
    for line in process.stdout:
        event = read_event(line)
        if isinstance(event, Progressed) and event.num_shards_done == 4:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    first = tmp_path / ".out.converting/result/model-00001-of-00105.safetensors"
    written = {path: path.stat().st_ino for path in first.parent.iterdir()}
    assert len(written) >= 4
    process = runner(*arguments)
    output, _ = process.communicate(timeout=150)
    events = [read_event(line) for line in output.splitlines()]
    assert process.returncode == 0
    assert isinstance(events[0], Planned)
    assert events[0].kept_bytes > 0
    kept = [(out / path.name).stat().st_ino for path in written]
    assert sum(a == b for a, b in zip(kept, written.values(), strict=True)) >= len(written) - 1
    assert_equal(values(out), values(releases["fp8"]))


@pytest.mark.timeout(180)  # starts processes that import torch
def test_command_shows_what_happens_and_what_is_wrong(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    command = ["convert", str(releases["fp8"]), str(tmp_path / "out"), "--to", "fp32"]
    processes = [
        runner(*command, module="services.cli"),
        runner("convert", "nothing", str(tmp_path / "other"), "--to", "fp8", module="services.cli"),
    ]
    (output, _), (_, errors) = (process.communicate(timeout=150) for process in processes)
    assert [process.returncode for process in processes] == [0, 1]
    assert b"FP8 release: " in output
    assert b"tensors" in output
    assert errors.decode().strip() == "nothing is no directory."
    assert_equal(values(tmp_path / "out"), values(releases["fp8"]))


PEAK = """
import sys
from pathlib import Path
from services.trainer.convert.conversion import Request, convert

def kilobytes(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])

small, big, target = map(Path, sys.argv[1:4])
sources = {"release": (small, big)}
for step in sys.argv[4:]:
    source, to = step.split(" to ")
    small, big = sources[source]
    sources[to] = target / f"small_{to}", target / to
    convert(Request(small, sources[to][0], to), lambda event: None)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts over
    base = kilobytes("VmRSS")
    request = Request(big, sources[to][1], to, max_shard_bytes=8_000_000)
    convert(request, lambda event: None)
    print(kilobytes("VmHWM") - base)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of 60 MB with matrices of 256 KB."""
    arch = replace(
        SMALL,
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_hash_layers=0,
        compress_ratios=(0, 4, 128, 4),
    ).with_format("fp8")
    path = tmp_path_factory.mktemp("big") / "release"
    write_release(path, arch, random_weights(arch, seed=1), shard_bytes=4_000_000)
    return path


@pytest.mark.timeout(180)  # starts processes that import torch
def test_memory_is_that_of_pieces_not_of_the_model(
    releases: dict[str, Path], big: Path, tmp_path: Path
) -> None:
    """Of what is written and of what is read: a torch_dist is converted back, too."""
    targets = ["bf16", "torch_dist", "transformers", "fp8"]
    sources = ["release", "release", "release", "torch_dist"]
    steps = [f"{source} to {to}" for source, to in zip(sources, targets, strict=True)]
    answer = subprocess.run(
        [sys.executable, "-c", PEAK, str(releases["fp8"]), str(big), str(tmp_path), *steps],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    for to, kilobytes in zip(targets, answer.stdout.split(), strict=True):
        written = sum(path.stat().st_size for path in (tmp_path / to).iterdir())
        assert written > 30e6
        assert int(kilobytes) * 1024 < 20e6, f"{to}: {kilobytes} KB for {written / 1e6:.1f} MB"


def flip_bit(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
