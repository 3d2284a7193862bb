"""The fused kernels, run by Triton's interpreter in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each boundary case says: nothing, or what is wrong."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernel_cases"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    found: dict[str, str] = json.loads(child.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["fp8", "fp4", "delta"])
def test_kernels_give_the_bytes_of_the_plain_code(outcomes: dict[str, str], form: str) -> None:
    mine = {name: wrong for name, wrong in outcomes.items() if name.startswith(form)}
    assert len(mine) >= 15
    assert not {name: wrong for name, wrong in mine.items() if wrong}


def test_tensors_on_the_cpu_never_load_the_kernels() -> None:
    program = """
import sys, torch
from shared.quant import fp4, fp8
from shared.weights.tensor_delta import encode_tensor_delta
weight = torch.ones(128, 128)
fp8.dequantise_fp8(*fp8.quantise_fp8(weight))
fp4.dequantise_fp4(*fp4.quantise_fp4(weight))
encode_tensor_delta(weight, 2 * weight)
sys.exit("triton" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)
