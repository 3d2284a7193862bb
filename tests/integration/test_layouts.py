"""Every layout trains the same policy as one rank: losses, gradients, weights, scores, checkpoints.

Reductions over ranks add in another order: relative to the whole tensor, FP32 weights agree to
`WEIGHTS` and gradients, where a small sum of large terms may be left, to `GRADIENTS`. What Adam
keeps after the first step is the gradient itself (times 0.1 and the clipping), which is how
gradients are compared.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.trainer.convert.torch_dist import TorchDist
from shared.models.deepseek_v4.checkpoint import write_release
from shared.weights.stored import StoredVersion
from tests.integration.layout_world import ROUNDS, STEPS, VOCABULARY, batch
from tests.tiny_deepseek_v4 import SMALL, random_weights

pytestmark = pytest.mark.timeout(600)

LOSS, WEIGHTS, GRADIENTS, SCORES = 1e-6, 5e-6, 1e-3, 1e-5
ARCHITECTURE = replace(
    SMALL,
    vocab_size=VOCABULARY,
    sliding_window=8,
    num_nextn_predict_layers=1,
    compress_ratios=(0, 4, 8, 4, 8, 0),
    index_topk=3,
    swiglu_limit=10.0,
)
"""Three of five layers are hash routed, so that each cut has one behind it; an MTP block, trained
wherever it can be, reads the embedding from the last stage."""
WORLDS = {world.name: world for worlds in ROUNDS for world in worlds}
NAMES = [name for name in WORLDS if name not in ("one", "plain") and "fp8" not in name]
# A weight that differs in its last bit moves some operands over a rounding border, and a step of
# FP8 by this much; FP8 itself moves it five times as far. The first step starts from equal weights.
FP8_WEIGHTS = 3e-3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all layouts have left what they found."""
    folder = tmp_path_factory.mktemp("layouts")
    release = folder / "release"
    write_release(
        release,
        ARCHITECTURE.with_format("fp8"),
        random_weights(ARCHITECTURE, seed=3, spread=0.5),
    )
    with (folder / "log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.integration.layout_world", str(release), str(folder)],
            stdout=log,
            stderr=log,
            timeout=540,
            check=False,
        ).returncode
    assert code == 0, (folder / "log").read_text()[-4000:]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_trains_as_one_rank_does(out: Path, name: str) -> None:
    alone = "one" if WORLDS[name].mtp else "plain"
    one, other = found(out, alone), found(out, name)
    steps = other["metrics"]
    for expected, metrics in zip(one["metrics"][-len(steps) :], steps, strict=True):
        for key in ("loss", "grad_norm", "entropy", "delta_logprob_mean", "tis_weight_mean"):
            assert metrics[key] == pytest.approx(expected[key], rel=10 * LOSS, abs=LOSS), key
        assert metrics["response_tokens"] == expected["response_tokens"]
        mtp_loss = expected.get("mtp_loss", 0.0)
        assert metrics.get("mtp_loss", 0.0) == pytest.approx(mtp_loss, rel=1e-5)
    for expected_row, row in zip(one["scores"], other["scores"], strict=True):
        assert row == pytest.approx(expected_row, abs=SCORES)
    states = ("step3",) if "after" in name else ("step1", "step3")
    for state in states:
        assert_same_state(tensors(out / alone / state), tensors(out / name / state))


def test_a_layout_trains_as_one_rank_does_in_fp8(out: Path) -> None:
    """Experts are spread, everything else sees half of the samples."""
    one, other = found(out, "fp8"), found(out, "fp8 ep2")
    first = zip(one["metrics"][:1], other["metrics"][:1], strict=True)
    for expected, metrics in first:
        for key in ("loss", "grad_norm", "entropy"):
            assert metrics[key] == pytest.approx(expected[key], rel=10 * LOSS, abs=LOSS), key
    assert_same_state(tensors(out / "fp8" / "step1"), tensors(out / "fp8 ep2" / "step1"))
    expected, values = tensors(out / "fp8" / "step3"), tensors(out / "fp8 ep2" / "step3")
    weights = [key for key in expected if not key.startswith("optimizer.state.exp_avg")]
    assert max(relative(expected[key], values[key]) for key in weights) < FP8_WEIGHTS
    exact = tensors(out / "one" / "step3")
    assert max(relative(exact[key], values[key]) for key in weights) > 3 * FP8_WEIGHTS


def test_ranks_share_fp8_layers_and_keys(tmp_path: Path) -> None:
    """Tensor and expert-tensor ranks against the whole layer, in float64, cut at borders of blocks;
    and the gradient of the keys that all heads share."""
    with (tmp_path / "log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.integration.fp8_world", str(tmp_path)],
            stdout=log,
            stderr=log,
            timeout=120,
            check=False,
        ).returncode
    assert code == 0, (tmp_path / "log").read_text()[-4000:]


@pytest.mark.parametrize("name", [name for name in NAMES if "after" not in name])
def test_ranks_export_what_one_rank_does_to_the_byte(out: Path, name: str) -> None:
    one, other = exported(out, "one"), exported(out, name)
    assert one.keys() == other.keys()
    assert [key for key in one if one[key] != other[key]] == []


@pytest.mark.parametrize("name", ["tp2", "ep2", "tp2ep2", "pp2ep2", "etp2"])
def test_two_versions_that_ranks_exported_are_served_one_after_the_other(
    out: Path, name: str
) -> None:
    spec = EngineSpec(ARCHITECTURE.with_format("fp8"), 2, 64, True, num_threads=1)
    served, fresh = EmbeddedEngine(spec), EmbeddedEngine(spec)
    first, last = (served.load(out / name / f"v{version}", version) for version in (0, STEPS))
    assert first != last == fresh.load(out / name / f"v{STEPS}", STEPS)
    assert found(out, name)["checksums"] == {name: last}  # the ranks' own word
    sequences = [sample.token_ids.tolist() for sample in batch(1).samples]
    scores, expected = (one.score(sequences, 0.8, STEPS)[1] for one in (served, fresh))
    assert all(np.array_equal(*pair) for pair in zip(scores, expected, strict=True))
    rows = zip(scores, found(out, name)["rounded"], strict=True)
    medians = [float(np.median(np.abs(score - np.array(row)))) for score, row in rows]
    assert np.median(medians) < 1e-5  # but for a code that falls to the other side


@pytest.mark.parametrize("name", ["tp2 after pp2ep2", "one after pp2ep2"])
def test_ranks_of_another_layout_say_what_was_published(out: Path, name: str) -> None:
    """Two, or one, of what four have written."""
    checksums, writers = found(out, name)["checksums"], found(out, "pp2ep2")["checksums"]
    assert checksums["pp2ep2"] == writers["pp2ep2"]


def exported(out: Path, name: str) -> dict[str, bytes]:
    stored = StoredVersion.open(out / name / "v0")
    assert stored is not None
    entries = stored.manifest.tensors
    read = {entry.name: stored.tensor(entry.name) for entry in entries}
    return {
        key: f"{value[0].shape}".encode() + value[1].tobytes()
        for key, value in read.items()
        if value
    }


def found(out: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / name / "found.json").read_text())
    return read


@cache
def tensors(checkpoint: Path) -> dict[str, Tensor]:
    stored = TorchDist(checkpoint)
    return {name: stored.read(name) for name in stored.tensors}


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, expected in one.items():
        bound = GRADIENTS if name.startswith("optimizer.state.exp_avg") else WEIGHTS
        assert relative(expected, other[name]) < bound, name


def relative(expected: Tensor, value: Tensor) -> float:
    assert expected.shape == value.shape
    difference = (expected.double() - value.double()).norm()
    return float(difference / expected.double().norm().clamp_min(torch.finfo().tiny))
