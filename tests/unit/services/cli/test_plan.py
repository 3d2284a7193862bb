"""`plan` on the command line: figures, exit codes, JSON and mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands import app
from services.cli.plan import MODELS_DIR, read_layout
from shared.errors import ConfigInvalid
from shared.models.deepseek_v4.architecture import Architecture
from shared.parallel import Layout
from tests.tiny_deepseek_v4 import FLASH

MACHINE = ["--gpus", "16", "--gpu-memory", "288", "--host-memory", "3000"]
PUBLISHED = ["--model", "dsv4-flash", *MACHINE, "--layout", "TP1/PP4/EP4/LAST10"]


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_the_known_model_is_flash() -> None:
    assert Architecture.load(MODELS_DIR / "dsv4-flash.json") == FLASH


def test_the_published_run_fits_and_says_what_its_hosts_need() -> None:
    code, text = call(*PUBLISHED, "--recompute", "full", "--offload", "1")
    assert code == 0
    assert "fits: 114.0 GB to spare on the fullest GPU (stage 0)" in text
    assert "each GPU's experts takes 212.6 GB of its host" in text
    assert "TP1/PP4/EP4/DP4/LAST10 *" in text


def test_saves_in_the_background_are_asked_for() -> None:
    code, text = call(*PUBLISHED, "--recompute", "full", "--offload", "1", "--background-saves")
    assert code == 1
    assert "the host of node 0 needs 4,382.2 GB" in text
    assert "smallest change that fits: checkpoint.background = false" in text


def test_what_does_not_fit_comes_with_the_smallest_change() -> None:
    code, text = call(*PUBLISHED, "--offload", "1")
    assert code == 1
    assert "does not fit: each GPU of stage 0 needs 300.0 GB" in text
    assert "smallest change that fits: actor.recompute.mode = selective" in text


def test_json_has_the_same_figures() -> None:
    code, text = call(*PUBLISHED, "--recompute", "full", "--json")
    document = json.loads(text)
    assert code == 1
    assert document["fits"] is False
    assert document["smallest_change"] == {"actor.optimizer.offload.fraction": "0.5"}
    assert document["stages"][3]["layers"] == [33, 43]
    assert document["stages"][0]["memory"]["optimizer"] == pytest.approx(218.7e9, rel=0.01)
    assert {one["operation"] for one in document["traffic"]} >= {"all-to-all", "point-to-point"}


def test_a_job_file_is_planned_with_its_own_model() -> None:
    demo = Path(__file__).parents[4] / "configs" / "demo.toml"
    code, text = call("--job", str(demo), "--gpu-memory", "16", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["setup"]["dtype"] == "float32"
    assert document["setup"]["samples_per_step"] == 128


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("TP3", "does not divide 16"),
        ("XX2", "none of"),
        ("TP", "none of"),
        ("PP4/DP2", "leave DP4"),
    ],
)
def test_a_wrong_layout_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        read_layout(text, 16)


def test_layouts_read_what_they_print() -> None:
    layout = Layout(world=32, tensor=2, pipeline=4, context=2, expert=4, last_stage_layers=10)
    assert read_layout(str(layout), 32) == layout
