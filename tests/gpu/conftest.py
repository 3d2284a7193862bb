"""Tests that need a GPU, and the figures that they measure.

Elsewhere they are skipped. `python -m tests.gpu.run` runs them all and writes the figures down.
"""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron is imported

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS = "GPU_RESULTS"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def figures() -> dict[str, Any]:
    """What the tests measure, by topic; written as JSON to the file that GPU_RESULTS names."""
    return {"host": host()} if torch.cuda.is_available() else {}


@pytest.fixture(autouse=True)
def _write(figures: dict[str, Any]) -> Iterator[None]:
    """After each test: a later one may take the whole run with it."""
    yield
    if path := os.environ.get(RESULTS):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """A test finds the device empty, and its own peak."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.empty_cache()


def host() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
