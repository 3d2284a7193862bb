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
