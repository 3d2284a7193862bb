"""Speed and memory of the actor in BF16. Bounds are loose: the figures are what counts."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.actor_run import matrix_peak, measure_apart
from tests.gpu.releases import SINGLE, write_random_release

Figures = dict[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampler's rounding": {"actor": {"quantisation": "full"}},
    "emulated FP8": {"actor": {"precision": "fp8"}},
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "model"
    write_random_release(folder, SINGLE)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", VARIANTS)
def test_actor_trains_in_bf16(name: str, release: Path, figures: Figures) -> None:
    found = measure_apart(release, VARIANTS[name])
    kept = figures.setdefault("actor", {})
    kept["matrix_product_tflops_per_s"] = round(matrix_peak() / 1e12, 1)
    kept[name] = found
    assert found["tokens_per_s"] > 1000
    assert found["gib_peak"] < 130
