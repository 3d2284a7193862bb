"""A real SGLang server on the CPU: `make test-sglang` builds its environment and names it."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang; a missing one is an error of whoever started these tests."""
    python = os.environ.get("ROLLOUT_SGLANG__PYTHON", ".venv-sglang/bin/python")
    path = Path(python).absolute()
    assert path.exists(), f"{path} does not exist: run `make test-sglang`"
    return str(path)


@pytest.fixture(scope="session")
def sglang_fork(sglang_python: str) -> Path:
    """The fork that speaks the other dialect; first on PYTHONPATH it stands in for SGLang."""
    path = Path(sglang_python).parents[1] / "fork"
    assert (path / "sglang").is_dir(), f"{path} does not exist: run `make test-sglang`"
    return path
