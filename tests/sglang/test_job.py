"""A whole job sampled by a real SGLang server: the trainer scores what was sampled alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BOUND = 1e-3  # mean |delta log p| of every step, FP32 on both sides


@pytest.mark.timeout(900)
def test_the_demo_job_trains_on_what_the_server_sampled(sglang_python: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ROLLOUT_SGLANG__PYTHON": sglang_python,
        "ROLLOUT_SGLANG__PLATFORM": "cpu",
    }
    arguments = ["--job", "configs/demo-sglang.toml", "--rollout", "1", "--ports-from", "0"]
    demo = subprocess.run(
        [sys.executable, "-m", "services.cli", "demo", *arguments, "--runs-dir", str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout[-3000:]
    summary = json.loads(next(tmp_path.glob("demo-sglang-*/summary.json")).read_text())
    assert summary["steps"] == 5
    assert summary["samples_trained"] == 80
    assert summary["updates"]["failed"] == 0
    assert summary["delta_logprob"]["p99_worst_step"] < BOUND
    assert 0 < summary["delta_logprob"]["mean"] < BOUND
